"""attnplug's methods on an engine's pages: what all engines share. Nothing here knows an engine.

`phases` reads policies and says which methods pages can serve, `rows` are a batch's requests as the
host knows them, `state` is what a method keeps beside a layer's pages, and `layer` serves one
attention layer.
"""
