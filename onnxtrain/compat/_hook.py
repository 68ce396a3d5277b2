"""The start of onnxtrain's alias in an environment: `python -m onnxtrain alias on` copies this file into site-packages.

It waits for the first import of `onnxruntime`, and then gives its place to the finder of the onnxtrain that is
installed. Without one it does nothing. `python -m onnxtrain alias off` removes the copy.
"""

import sys


class Hook:
    """Of sys.meta_path."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """None but for onnxruntime. Imports neither onnxtrain nor torch."""
        if name.partition(".")[0] != "onnxruntime":
            return None
        from importlib import util

        package = util.find_spec("onnxtrain")
        if package is None or package.origin is None:  # none, or a folder that only has this name
            return None
        finder = sys.modules.get("onnxtrain.compat._alias")
        if finder is None:
            file = package.origin.replace("__init__.py", "compat/_alias.py")
            spec = util.spec_from_file_location("onnxtrain.compat._alias", file)
            if spec is None or spec.loader is None:
                return None
            finder = sys.modules[spec.name] = util.module_from_spec(spec)
            spec.loader.exec_module(finder)
        finder.install()
        return finder.Finder.find_spec(name, path)


if __name__ == "_onnxtrain_alias":  # the copy's name; this file may be imported by tools that walk the package
    sys.meta_path.insert(0, Hook())
