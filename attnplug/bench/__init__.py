"""How attnplug times itself: CUDA-graph replays, rows that say where and of what code they are, and
`attnplug bench --quick`, a table of one's own GPU."""
