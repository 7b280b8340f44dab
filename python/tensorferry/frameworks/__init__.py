"""For frameworks that name torch's or torchft's own classes: ``install`` puts tensorferry's in their place."""
