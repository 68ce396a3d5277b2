"""Parts of onnxtrain.export, used by export.py alone.

state: leave the module as it was. rewrite, with replacements and function_apply: what torch.onnx gets wrong, put right
while tracing. translations and domain: what the exporters write. mutations: changes in place. guards: when an export may
be reused. sizes: example sizes of 1 kept dynamic. graph: weights out, inputs and outputs bound.
"""
