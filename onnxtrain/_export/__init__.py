"""Parts of onnxtrain.export, used by export.py and the modules above it.

captured: a graph of Dynamo's as a module. exported: what an export is. state: leaves the module as it was. rewrite,
with replacements, special, lookups, function_apply and checks: what torch.onnx gets wrong, put right while tracing.
functional, retrace: a traced program made simpler. translations, with arguments, elementary, parts and domain: what
torch.onnx writes. mutations, views: changes in place, results that share memory. guards: when an export may be reused.
sizes: example sizes of 1 kept dynamic. graph: weights out, inputs and outputs bound. twins: one export for equal
graphs. cache: exports on disk.
"""
