"""Networks that live inside transforms: masks, activations, bounds, triangular layers."""
