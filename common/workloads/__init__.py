"""The specifications, one module each: weights, data order and hyper-parameters for all frameworks."""
