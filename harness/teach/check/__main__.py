from harness.teach.check.report import main

main()
