"""What a model has measured once for all its prompts: `sketch`'s basis of its keys, which the
command `attnplug calibrate` makes and keeps in attnplug's cache folder."""
