"""The requirements on an engine, in plain pytest. `./launch.sh conform mine.py` tests your own engine.

    @pytest.mark.ranks(2, 3)                      how many ranks; by default two. `thorough=`: these with -m thorough
    @pytest.mark.stages("zero2", "zero3")         for these engines of ours; default: for every engine, also your own
    @pytest.mark.needs("groups")                  of other engines for those that support several parameter groups
    @pytest.mark.chapters                         also for the chapters
    @pytest.mark.parametrize("bucket_mb", [0, 1])
    def test_something(engine, bucket_mb):
        \"""One sentence: what must be true.\"""
        model = seeded(Blocks)
        trained = engine(model, ADAMW(model.parameters()), bucket_mb=bucket_mb)
        ...
        assert trained.world_size == dist.get_world_size()

The body runs on all ranks at the same time, and the test fails if it fails on one of them. `engine` is a `Subject`
(subjects.py), a builder that is called like a stage. `Pair` (pair.py) trains an engine and plain torch and compares
them. tests/helpers.py has models, batches and a recorder of memory and traffic.

Parameters and fixtures are sent to the ranks, so they must be plain values: a name, a number, a path. To choose a
function or a class, pass its name and look it up in a dictionary on the rank.
"""
