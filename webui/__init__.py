"""Read-only pages over what the API shows.

- `render`  values of `protocol.views` to HTML, pure, everything escaped
- `pages`   the routes `/`, `/page` and `/static/...`
- `static`  the page's frame, its style and its script, written by hand
"""
