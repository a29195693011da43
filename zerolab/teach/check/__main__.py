from zerolab.teach.check.command import main

main()
