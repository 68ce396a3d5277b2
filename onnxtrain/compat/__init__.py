"""Other packages' names for onnxtrain's modules."""
