import sys

from harness.teach.watch.command import main

sys.exit(main())
