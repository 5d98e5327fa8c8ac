"""HTTP requests with the standard library, for clients that carry a key."""

import urllib.request


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """Returns None, so that the answer that redirects is an HTTPError like others that are not a success."""


WITHOUT_REDIRECTS = urllib.request.build_opener(_NoRedirects)
"""Opens requests, and does not follow a server elsewhere, which would get the key."""
