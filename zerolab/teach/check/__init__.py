"""`./launch.sh check zero2`: the tests of the exercises, in plain pytest.

test_zero2.py    the tests of the exercise zero2, in the order of its steps. There is a file for each exercise
helpers.py       what the tests share: small trainings, what is recorded of them, messages that guess the mistake
models.py        their models and data
student.py       a student's file as a module in which all blanks but one are the chapter's
conftest.py      pytest's options, the fixture `stage`, and a line for each blank
command.py       the command: one file, or all files of a folder; then the conformance tests judge the whole file

A test is added by writing it, without reading anything but the file that it goes to:

    @pytest.mark.blank("Reduction.start")     the blank that it judges; without the mark, every blank
    @on_ranks
    def test_something(stage):                the body runs on every rank, with the student's class
        engine = build(stage)
        ...
        expect("the turn after backward", engine.turn, 3)

Without the command: pytest zerolab/teach/check/test_zero2.py --file exercises/zero2.py
"""
