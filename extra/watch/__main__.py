import sys

from extra.watch.command import main

sys.exit(main())
