"""The main job, as ``demo`` shows it: orders are published and handled, some fail, the broker dies, none is lost.

`shop` does the job with nothing but what every user of the library has; `outages` makes the broker die; `display` shows
both while they run; `verdict` closes the account.
"""
