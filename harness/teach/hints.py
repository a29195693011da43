"""The first hint of every blank of the exercises: what to think of. The second one is in exercise.py: how to do it.

By the blank's task, as `harness/teach/exercise.py` names it.
"""

IDEAS = {
    "Step 0: lay the parameters end to end, and pad": "Which sizes must be multiples of what, and which of them "
    "depends on N? Round up as you go, once more at the end, and try it by hand for three parameters and N = 2.",
    "Step 0: cut the shard into one part per parameter": "Two ranges of numbers overlap or they do not. In whose "
    "coordinates does the parameter lie, and in whose does `shard` begin at 0?",
    "Step 3: all-reduce the gradients, and give each piece its part of the mean": "After the collective every rank has "
    "a sum, of which it uses one part. Why is it better to start all buckets before the first is waited for?",
    "Step 4: reduce, update this rank's pieces, gather": "Which of the three needs what another one leaves behind?",
    "Step 5: all-gather the updated shards into the weights": "Who has the new values of which part, and where must "
    "they arrive so that the model sees them, with no copy after it?",
    "Step 3: reduce-scatter the gradients, and give each piece its part of the mean": "Of all that the all-reduce "
    "brings, what does this rank use? Which collective brings just that, and how large is its output?",
    "Step 3: send one bucket's gradients by reduce-scatter": "Where must each gradient lie so that cutting the buffer "
    "into N parts is cutting the parameters? Who still reads the buffer when the call has returned?",
    "Step 3: receive this rank's shard of the mean, and free the whole gradients": "Which tensors keep the large "
    "buffer's memory alive, and a view of it too? What if a gradient of this step is there already?",
    "Step 3: at most one bucket in flight": "Sending is quick and travelling is slow. At which moment must the one "
    "before have arrived, so that never more than two buckets are whole?",
    "Step 3: inside backward, send the buckets whose turn has come": "Two ranks may complete their buckets in another "
    "order. What would the third collective of one rank meet on the other?",
    "Step 3: clip the gradients by their norm over all shards": "What is the norm of a vector that is cut into parts, "
    "when you know each part's norm? Who must know it, and what about a rank that has no part?",
    "Step 0: put every parameter into one unit, or into the root": "What if two modules share a weight, and if one has "
    "no weights? The engine has helpers for both.",
    "Step 5: free a unit": "Who has views of the gathered buffer, besides the module? What can be taken away from all "
    "of them at once? And what if a collective still writes to it?",
    "Step 5: start to gather a unit": "What is the opposite of what `_free` does? Who waits, and when?",
    "Step 1: gather before forward, and prefetch": "What is needed now, what is needed next, and for which of the two "
    "does the rank have to stand still?",
    "Step 2: gather before backward, and prefetch": "As before forward, the other way round.",
    "Step 2: free after backward": "Will anybody read these weights again in this step?",
    "Step 3: reduce a unit whose gradients are final": "Which of the unit's buckets have gradients at all? Is every "
    "weight of the unit done with, now that these are final?",
}
