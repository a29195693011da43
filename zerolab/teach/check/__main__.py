from zerolab.teach.check.report import main

main()
