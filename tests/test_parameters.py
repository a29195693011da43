"""Functions and properties that users call on a parameter of ZeRO-3 while it is freed: which ones read its values."""

import copy
import pickle
from operator import attrgetter, itemgetter, methodcaller

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zerolab.engine.parameters import EngineParameter, FreedParameter


def assign_data(param):
    param.data = torch.zeros(2, 3)


def linear(param):
    return F.linear(torch.ones(1, 3), param)


def fill(param):
    with torch.no_grad():
        param[0] = 1.0


READ_VALUES = {
    "data": attrgetter("data"),
    "T": attrgetter("T"),
    "detach": methodcaller("detach"),
    "item": methodcaller("item"),
    "copy_": methodcaller("copy_", torch.zeros(2, 3)),
    "data_ptr": methodcaller("data_ptr"),
    "linear": linear,
    "isfinite": torch.isfinite,
    "an element": itemgetter(0),
    "assign to elements": fill,
    "assign data": assign_data,
    "nn.init": nn.init.ones_,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}

DO_NOT = {
    "shape": attrgetter("shape"),
    "dtype": attrgetter("dtype"),
    "device": attrgetter("device"),
    "ndim": attrgetter("ndim"),
    "requires_grad": attrgetter("requires_grad"),
    "is_leaf": attrgetter("is_leaf"),
    "grad": attrgetter("grad"),
    "size": methodcaller("size"),
    "numel": methodcaller("numel"),
    "stride": methodcaller("stride"),
    "element_size": methodcaller("element_size"),
    "is_contiguous": methodcaller("is_contiguous"),
    "is_floating_point": methodcaller("is_floating_point"),
    "len": len,
}


def freed():
    param = nn.Parameter(torch.zeros(2, 3))
    param.__class__ = FreedParameter
    return param


@pytest.mark.parametrize("name", READ_VALUES)
def test_what_reads_the_values_of_a_freed_parameter_raises_an_error(name):
    """The memory of this one is there. So a function that is not refused returns something, and the test fails."""
    with pytest.raises(RuntimeError, match=r"of shape \(2, 3\) has no values any more"):
        READ_VALUES[name](freed())


@pytest.mark.parametrize("name", DO_NOT)
def test_what_only_describes_a_freed_parameter_works(name):
    plain = nn.Parameter(torch.zeros(2, 3))
    assert DO_NOT[name](freed()) == DO_NOT[name](plain)


def test_a_freed_parameter_still_takes_hooks_and_can_be_frozen():
    """Libraries do this between the build and the first forward."""
    param = freed()
    param.register_hook(print)
    param.requires_grad_(False)
    assert not param.requires_grad and len({param: 1}) == 1
    assert torch.empty_like(param).shape == torch.zeros_like(param).shape == (2, 3)


def test_a_pickled_parameter_is_an_ordinary_one():
    """With its marks, which optimizers' rules may read, and without the engine's."""
    param = nn.Parameter(torch.ones(2))
    param.__class__ = EngineParameter
    param.bucket = freed  # stands for a reference to the engine
    param.no_decay = True
    again = pickle.loads(pickle.dumps(param))
    assert type(again) is nn.Parameter and again.no_decay and not hasattr(again, "bucket")
    assert torch.equal(again, torch.ones(2)) and again.requires_grad
    assert type(copy.deepcopy(param)) is EngineParameter and copy.deepcopy(param).bucket is None
