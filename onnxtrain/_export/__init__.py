"""Parts of onnxtrain.export, used by export.py alone.

state: leave the module as it was. rewrite: what torch.onnx gets wrong, put right while tracing. guards: when an export
may be reused. sizes: example sizes of 1 kept dynamic. graph: weights out, inputs and outputs bound.
"""
