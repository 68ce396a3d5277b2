"""Parts of onnxtrain.export, used by export.py alone.

exported: what an export is. state, with snapshot: leave the module as it was. refusals: what a trace would drop.
rewrite, with replacements, function_apply, flags and checks: what torch.onnx gets wrong, put right while tracing.
translations, with arguments and special, and domain: what the exporters write. mutations: changes in place. guards:
when an export may be reused. sizes: example sizes of 1 kept dynamic. graph: weights out, inputs and outputs bound.
cache: exports on disk.
"""
