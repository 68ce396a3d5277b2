"""Parts of onnxtrain.export, used by export.py and the modules above it.

captured: a graph of Dynamo's as a module. exported: what an export is. state: leaves the module as it was.
functionalization: changes in place and views, by PyTorch's own. rewrite, with instead, replacements, decompositions,
lookups, recompute_regions, autograd_calls and checks: what torch.onnx gets wrong, put right while tracing. simplify,
retrace: a traced program made simpler. translations, with arguments, elementary, slices and domain: what torch.onnx
writes. views: results that share memory. guards: when an export may be reused. graph: weights out, inputs and outputs
bound. cache: exports on disk. Each other module says in its first line what it is and who uses it.
"""
