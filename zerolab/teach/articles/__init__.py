"""Claims of five articles about ZeRO and FSDP, and the run that judges each: `./launch.sh articles`.

Each claim is a function, and its docstring is the claim. We wrote the sentences and the code; none of
an article's is here.
"""

from zerolab.teach.articles import on_memory, on_traffic, printed
from zerolab.teach.articles.claim import claims_of

CLAIMS = [*claims_of(on_memory), *claims_of(on_traffic), *claims_of(printed)]
