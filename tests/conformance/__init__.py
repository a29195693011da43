"""What an engine must be, in plain pytest. `./launch.sh conform mine.py` asks it of an engine of your own.

    @pytest.mark.ranks(2, 3)                      how many ranks; by default two. `thorough=`: these with -m thorough
    @pytest.mark.stages("zero2", "zero3")         asked of engines that promise to be like these; default: of all
    @pytest.mark.chapters                         the three chapters are asked, too; `chapters("zero3")`: these
    @pytest.mark.parametrize("bucket_mb", [0, 1])
    def test_something(engine, bucket_mb):
        \"""One sentence: what must be true.\"""
        model = seeded(Blocks)
        trained = engine(model, ADAMW(model.parameters()), bucket_mb=bucket_mb)
        ...
        assert trained.world_size == dist.get_world_size()

The body runs on every rank, all at the same time, and the test fails if it fails on one of them. `engine` is a
`Subject` (subjects.py): a builder that is called as a stage is. `Pair` (pair.py) trains an engine and plain torch side
by side. Models, batches and what records memory and traffic are in tests/helpers.py.

Parameters and fixtures are sent to the ranks, so they must be plain values: a name, a number, a path. A function or a
class can be chosen on the rank by its name, from a dictionary.
"""
