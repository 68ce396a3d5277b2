"""Parts of onnxtrain.export: state (leave the module as it was), rewrite (what torch.onnx gets wrong, put right while
tracing), guards (when an export may be reused), graph (weights out, inputs and outputs bound). Used by export.py alone."""
