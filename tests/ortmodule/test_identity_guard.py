"""A Watch finds the first container that holds another object than before, even an equal one."""

import pytest

from onnxtrain import _C


def test_the_first_that_differs():
    absent, value, names, items, kinds = object(), [1], {}, [], {1, 2}
    names["a"] = value
    items.append(value)
    watch = _C.Watch([(names, None, ("a", value)), (names, ("a", "b"), (value, absent)), (items, None, (value,)),
                      (kinds, None, {1, 2})], absent)
    assert watch.changed() == -1
    kinds.add(3)
    assert watch.changed() == 3
    items[0] = [1]
    assert watch.changed() == 2
    names["b"] = None
    assert watch.changed() == 0
    with pytest.raises(TypeError, match="keys must be a tuple as long as values"):
        _C.Watch([(names, ("a",), ())], absent)
