import sys

from zerolab.teach.museum.visit import main

sys.exit(main())
