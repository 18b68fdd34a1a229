"""Whether the Hugging Face hub can be reached."""

import contextlib
import socket
import threading
import urllib.parse
import urllib.request

PROBE_SECONDS = 3.0


def hub_answers() -> bool:
    """Whether the Hugging Face hub can be reached, in PROBE_SECONDS at most: its own client tries
    for most of a minute. True behind a proxy, which only that client knows to use."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    endpoint = urllib.parse.urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies().get(endpoint.scheme):
        return True
    place = endpoint.hostname, endpoint.port or (80 if endpoint.scheme == "http" else 443)
    reached = threading.Event()

    def probe() -> None:
        with contextlib.suppress(OSError), socket.create_connection(place, PROBE_SECONDS):
            reached.set()

    # In a thread: looking the name up has no time limit of its own.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return reached.is_set()
