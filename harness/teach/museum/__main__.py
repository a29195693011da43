import sys

from harness.teach.museum.visit import main

sys.exit(main())
