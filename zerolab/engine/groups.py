"""Parameter groups: different learning rates or weight decays for different parameters.

A chapter gives the optimizer one flat shard per bucket, and a flat shard has one learning rate. An engine gives it one
**piece** per parameter instead: the elements of this parameter that are in this rank's shard. A piece is a view of the
shard, so it costs no memory. It joins the group that its parameter was in, and keeps the group's options.

    shard    000000000000111111111111222222222222     (the rank that owns it)
    flat     aaaaaaaaaaaaaaa.bbb.ccccccccc...ddd.
    rank 1               aaa bbb cccc                 three pieces: the end of a, all of b, the start of c

You choose groups on the real parameters, by shape, name or attribute, before the engine takes over the optimizer. If a
rank owns no element of a group, the group is empty on this rank. The cost: AdamW keeps a 4-byte step counter per piece,
and updates many small tensors instead of a few large ones.

DeepSpeed flattens each group into its own buffer. FSDP2 keeps one DTensor per parameter.
"""


def cut(bucket, shard):
    """{parameter: its elements in `shard` (shard_numel,)}, for parameters that have any on this rank.

    Each value is a 1-D view. For a parameter that is never cut (whole.py) the view has the parameter's shape.
    """
    pieces = {}
    for param, shape, offset in zip(bucket.params, bucket.shapes, bucket.offsets):
        begin = max(offset - bucket.own.start, 0)
        end = min(offset - bucket.own.start + shape.numel(), bucket.shard_numel)
        if begin < end:
            pieces[param] = shard[begin:end] if bucket.owners is None else shard[begin:end].view(shape)
    return pieces


def first_element(bucket, param):
    """The index, in the flattened parameter, of the first element that is in this rank's shard."""
    index = next(index for index, each in enumerate(bucket.params) if each is param)
    return max(bucket.own.start - bucket.offsets[index], 0)


def take_over(optimizer, buckets):
    """Step 0: pieces take the parameters' place in the optimizer's groups."""
    bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
    before = dict(optimizer.state)  # empty, except for Adagrad, which creates its state in its constructor
    optimizer.state.clear()
    for param_group in optimizer.param_groups:
        pieces = []
        for param in param_group["params"]:
            bucket = bucket_of.get(param)  # None for a frozen parameter
            if bucket is None or param not in bucket.pieces:
                continue
            piece = bucket.pieces[param]
            first = first_element(bucket, param)
            for key, value in before.get(param, {}).items():
                if key != "step":
                    value = value.flatten()[first : first + piece.numel()].clone().view(piece.shape)
                optimizer.state[piece][key] = value
            pieces.append(piece)
        param_group["params"][:] = pieces
        param_group.pop("param_names", None)  # there if the optimizer was built over named_parameters()


def hand_out_gradients(bucket):
    """The end of step 3: each piece gets a view of its part of the shard's gradient.

    Raises RuntimeError if a piece has a gradient already, because your loop has set it, and it would be lost.
    """
    gradients = cut(bucket, bucket.shard.grad)
    for param, piece in bucket.pieces.items():
        if piece.grad is not None:
            raise RuntimeError(
                "the gradient of a parameter in optimizer.param_groups was set before the gradients were reduced. Call "
                "engine.reduce_gradients() after backward, and change the gradients then"
            )
        piece.grad = gradients[param]


def collect_gradients(bucket, shard_gradient):
    """The opposite of `hand_out_gradients`: copy the pieces' gradients to their places in `shard_gradient`.

    A missing gradient becomes zero. Your loop has set it to None, or no rank has used the parameter.
    """
    for param, place in cut(bucket, shard_gradient).items():
        piece = bucket.pieces[param]
        if piece.grad is None:
            place.zero_()
        elif piece.grad.data_ptr() != place.data_ptr():
            place.copy_(piece.grad)
        piece.grad = None


def collect_values(bucket):
    """After step 4: copy values to the shard from optimizers that assign `param.data` instead of writing in place."""
    storage = bucket.shard.untyped_storage()._cdata
    moved = {param: piece for param, piece in bucket.pieces.items() if piece.untyped_storage()._cdata != storage}
    if moved:
        places = cut(bucket, bucket.shard.detach())
        for param, piece in moved.items():
            piece.data = places[param].copy_(piece.detach())
