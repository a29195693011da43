"""`./launch.sh check zero2`: the tests of the exercises, in plain pytest.

test_zero2.py    the tests of the exercise zero2, in the order of its steps. There is a file for each exercise
helpers.py       what the tests share: small trainings, what is recorded of them, messages that guess the mistake
models.py        their models and data
student.py       a student's file as a module in which all blanks but one are the chapter's
conftest.py      pytest's options, the argument `stage`, and the order of the tests
command.py       the command: one file, or all files of a folder; then the conformance tests judge the whole file

The check needs a clone of the project, because the conformance tests are in tests/, and it needs pytest.

docs/teachers.md, "Your own tests", shows how to add a test.
"""
