"""DEPLOY: a Ray Serve application of whole servers behind one front, which routes with `routing`."""
