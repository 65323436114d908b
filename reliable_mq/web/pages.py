"""The request handlers. Each reads an address or a form and renders a template.

Invariants:

- A GET changes nothing on the broker, except that it may read a queue that was not read before.
- A form holds everything that its operation needs, so it works without scripts. It also works if the page is minutes
  old, because each letter that it names is looked up again.
- Every text passes through `visible` and then through HTML escaping. No template disables either.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import anyio
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse

from reliable_mq._util.validation import is_text
from reliable_mq.codec.tables import encode_short_string
from reliable_mq.errors import BrokerUnavailable, ConfigurationError, ReliableMQError, UsageError
from reliable_mq.web.access import is_of_another_site
from reliable_mq.web.address import FIELDS, Choice, Fields, ago, encoded, exactly
from reliable_mq.web.content import FORMS, body_as, edit_problem, rows_of_headers, rows_of_properties, visible
from reliable_mq.web.jobs import Job, JobState
from reliable_mq.web.operations import AuditLog, Operations, ReplayOptions

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from reliable_mq.deadletters import DeadMessage
    from reliable_mq.web.access import Guard
    from reliable_mq.web.letters import Letter, QueueReading, Source

_ON_A_PAGE: Final = 50  # letters
_GROUPS: Final = 12
_ALL_GROUPS: Final = 500
_LARGEST_FORM: Final = 1024 * 1024  # bytes
_READ_WITHIN: Final = 1.0  # seconds for which a page waits for a reading before it shows the progress
_LETTER_WITHIN: Final = 60.0  # seconds for which a page waits for a letter whose content is not kept
_CHECKED_EVERY: Final = 0.02  # seconds between two checks whether it is read
_NOT_READ: Final = "The letter has not been read yet, because operations on this queue go on."
_GONE: Final = "This letter is not in the queue: it was replayed or deleted."
_EDIT_ELSEWHERE: Final = (
    "Download its body, correct it, and replay the letter in Python: DeadLetterQueue.replay(body=…)."
)
_STATUS: Final = ((ConfigurationError, 400), (UsageError, 409), (BrokerUnavailable, 503))
_HTMX: Final = "htmx-2.0.11.min.js"
#: The hash of that file, which is ``htmx.org`` in the npm registry. Browsers refuse any other content.
_HTMX_INTEGRITY: Final = "sha384-2OatzQy1H+Zd/IIrjr1TcuDGqLXeHhbooAyJY1KdQMKnr4LZ22k31GBLdYKHmVjg"


class Pages:
    """The handlers of requests."""

    guard: Guard
    """The checks before them, set by the application."""

    def __init__(
        self, source: Source, operations: Operations, audit: AuditLog, *, allow_changes: bool, allow_editing: bool
    ) -> None:
        self._source = source
        self._operations = operations
        self._audit = audit
        self._allow_changes = allow_changes
        self._allow_editing = allow_editing
        self._templates = Environment(
            loader=PackageLoader("reliable_mq.web"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_shown,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals.update(
            htmx=_HTMX,
            integrity=_HTMX_INTEGRITY,
            ago=ago,
            exactly=exactly,
        )
        self.exception_handlers: Mapping[Any, Callable[..., Any]] = {
            HTTPException: self._http_error,
            ReliableMQError: self._error,
            OSError: self._error,
        }

    # -- looking -------------------------------------------------------------------------------------------------------

    async def queues(self, request: Request) -> Response:
        """Return the list of queues, or only the part that is refreshed."""
        rows, problem = await run_in_threadpool(self._queue_rows)
        if Fields(request.url.query).get("part") == "list":
            return self._page(request, "queue_rows.html", rows=rows, problem=problem)
        return self._page(
            request, "queues.html", rows=rows, problem=problem, any_queue=self._source.any_queue, title="Queues"
        )

    async def letters(self, request: Request) -> Response:
        """Return the letters of a queue that match the filter in the address."""
        fields, queue = await self._asked(request)
        reading = self._operations.reading(queue)
        if reading is None:
            job = self._operations.read(queue, _user(request))
            await run_in_threadpool(job.wait, _READ_WITHIN)
            reading = self._operations.reading(queue)
            if reading is None:
                return self._to_reading(request, job, encoded(pair for pair in fields.pairs if pair[0] != "queue"))
        self._source.remember(queue)
        try:
            choice, wrong = Choice.of(fields, "queue", "page", "groups"), ""
        except ConfigurationError as error:
            choice, wrong = Choice.of_pairs([]), str(error)
        page = fields.number("page", most=100_000) or 1
        view = await run_in_threadpool(self._letters_view, reading, choice, page, fields.get("groups") == "all")
        return self._page(
            request,
            "letters.html",
            400 if wrong else 200,
            title=queue,
            queue=queue,
            reading=reading,
            choice=choice,
            wrong=wrong,
            given={name: fields.get(name) for name in FIELDS},
            jobs=self._changing(queue),
            **view,
        )

    async def letter(self, request: Request) -> Response:
        fields, queue = await self._asked(request)
        form = fields.get("as")
        choice = Choice.of(fields, "queue", "id", "as")
        opened = await self._open(request, queue, fields.get("id"))
        if isinstance(opened, str):
            return self._not_opened(request, queue, opened)
        reading, letter, message = opened
        view = await run_in_threadpool(self._letter_view, reading, letter, message, choice, form)
        return self._page(
            request, "letter.html", title=message.message_id or "Letter", queue=queue, choice=choice, **view
        )

    async def body(self, request: Request) -> Response:
        """Return the body of a letter as a file."""
        fields, queue = await self._asked(request)
        opened = await self._open(request, queue, fields.get("id"))
        if isinstance(opened, str):
            return self._not_opened(request, queue, opened)
        _, letter, message = opened
        name = f"{_file_name(queue)}-{letter.fingerprint[:8]}.bin"
        return Response(message.body, media_type="application/octet-stream", headers=_attachment(name))

    async def audit_log(self, request: Request) -> Response:
        entries = [{**entry, "when": _parsed(entry["at"])} for entry in self._audit.latest()]
        return self._page(request, "audit.html", title="Audit log", entries=entries, where=self._audit.where)

    # -- operations ----------------------------------------------------------------------------------------------------

    async def read(self, request: Request) -> Response:
        fields, queue = await self._asked(request)
        job = self._operations.read(queue, _user(request))
        await run_in_threadpool(job.wait, _READ_WITHIN)
        return self._to_reading(request, job, fields.get("choice"))

    async def reading(self, request: Request) -> Response:
        """Return the progress of a reading, and after its end its letters or its error."""
        fields, queue = await self._asked(request)
        job = self._operations.jobs.get(fields.get("id"))
        if job is None or (job.is_over and job.state is not JobState.FAILED):
            chosen = (pair for pair in Fields(fields.get("choice")).pairs if pair[0] != "queue")
            return self._redirect(request, f"/letters?{encoded([('queue', queue), *chosen])}")
        if job.is_over:
            return self._page(request, "error.html", 503, title=queue, text=job.error, queue=queue)
        return self._page(request, "reading.html", title=queue, queue=queue, job=job)

    async def replay(self, request: Request) -> Response:
        """Return the form for a replay, or begin a replay or dry run with its options."""
        fields, queue = await self._asked(request)
        choice = _choice(fields)
        go, wrong = fields.get("go"), ""
        if go == "replay":
            self._need_changes()
        if go:
            try:
                options = _options(fields, dry_run=go != "replay")
                return self._to_job(request, self._operations.replay(queue, choice, _user(request), options))
            except ConfigurationError as error:
                wrong = str(error)
        given = {"target": "origin", "to": "", "rate": "", "limit": ""}
        given |= {key: fields.get(key) for key, _ in fields.pairs}
        return await self._ask(request, "replay.html", queue, choice, title="Replay", wrong=wrong, given=given)

    async def purge(self, request: Request) -> Response:
        """Return the form for a purge, or begin it if the queue's name was typed."""
        self._need_changes()
        fields, queue = await self._asked(request)
        choice = _choice(fields)
        wrong = ""
        if fields.get("go"):
            typed = fields.typed("name")
            if queue in (typed, typed.strip()):
                return self._to_job(request, self._operations.purge(queue, choice, _user(request)))
            wrong = "The name is not that of the queue. Nothing was deleted."
        return await self._ask(request, "purge.html", queue, choice, title="Delete permanently", wrong=wrong)

    async def edit(self, request: Request) -> Response:
        """Return the form to edit a letter's body, or replay the letter with a new body."""
        self._need_changes()
        if not self._allow_editing:
            raise HTTPException(403, "Letters are replayed as they are: editing is not allowed here.")
        fields, queue = await self._asked(request)
        typed: bytes | None = None
        if request.method == "POST":
            given = fields.all("body")
            if not given:
                raise ConfigurationError("body is missing: that of the copy, which may be empty")
            # A form sends CR LF for every line end. This loses nothing, because a body with a CR cannot be edited.
            typed = given[-1].replace("\r\n", "\n").encode("utf-8", "surrogateescape")
        opened = await self._open(request, queue, fields.get("id"))
        if isinstance(opened, str):
            if typed is None or edit_problem(typed):
                return self._not_opened(request, queue, opened)
            return self._edit_form(request, queue, fields.get("id"), "", typed, opened or _GONE, 503 if opened else 404)
        _, letter, message = opened
        problem = edit_problem(message.body)
        if problem:
            raise HTTPException(409, f"This letter cannot be edited in the page: {problem}. {_EDIT_ELSEWHERE}")
        if typed is None:
            return self._edit_form(request, queue, letter.fingerprint, message.message_id or "", message.body)
        choice = Choice.of_pairs([("letter", letter.fingerprint)])
        options = ReplayOptions(body=typed, limit=1)
        return self._to_job(request, self._operations.replay(queue, choice, _user(request), options))

    async def export(self, request: Request) -> Response:
        fields, queue = await self._asked(request)
        choice = _choice(fields)
        return self._to_job(request, self._operations.export(queue, choice, _user(request)))

    async def job(self, request: Request) -> Response:
        """Return an operation and its progress, or only the part that is refreshed."""
        fields = Fields(request.url.query)
        job = self._job(fields)
        part = fields.get("part")
        if part == "reading" and job.is_over:
            return PlainTextResponse("", headers={"HX-Refresh": "true"})
        template = {"progress": "job_progress.html", "reading": "reading_progress.html"}.get(part, "job.html")
        return self._page(request, template, title=job.kind.capitalize(), job=job, queue=job.queue)

    async def stop(self, request: Request) -> Response:
        job = self._job(await _form(request))
        if job.kind in ("replay", "purge"):
            self._need_changes()
        job.stop_by(_user(request))
        await run_in_threadpool(job.wait, _READ_WITHIN)
        return self._to_job(request, job)

    async def file(self, request: Request) -> Response:
        job = self._job(Fields(request.url.query))
        descriptor = self._operations.jobs.opened_file(job)
        if descriptor is None:
            raise HTTPException(404, "This export is no longer kept: export again.")
        name = f"{_file_name(job.queue)}-{job.begun:%Y%m%d-%H%M%S}.jsonl"
        return _Download(descriptor, media_type="application/jsonl", headers=_attachment(name))

    # -- signing in ----------------------------------------------------------------------------------------------------

    async def sign_in(self, request: Request) -> Response:
        """Return the form for the token, or begin a session if the token is right."""
        if not self.guard.has_token:
            raise HTTPException(404, "This page does not require signing in.")
        wrong = name = ""
        if request.method == "POST":
            fields = await _form(request)
            name = fields.get("name")
            response = self.guard.sign_in(request, fields.get("token"), name)
            if response is not None:
                return response
            wrong = "The token is wrong."
        return self._page(request, "sign_in.html", 403 if wrong else 200, title="Sign in", wrong=wrong, name=name)

    async def sign_out(self, request: Request) -> Response:
        return self.guard.sign_out(request)

    # -- private -------------------------------------------------------------------------------------------------------

    def _page(self, request: Request, template: str, status: int = 200, **values: Any) -> Response:
        root = request.scope.get("root_path", "")

        def at(path: str, *pairs: tuple[str, object], query: str = "") -> str:
            parts = [encoded((name, str(value)) for name, value in pairs), query]
            text = "&".join(part for part in parts if part)
            return f"{root}{path}?{text}" if text else f"{root}{path}"

        common = {
            "at": at,
            "user": _user(request),
            "broker": self._source.broker,
            "allow_changes": self._allow_changes,
            "allow_editing": self._allow_editing,
            "signs_in": self.guard.has_token,
            "now": datetime.now(UTC),
        }
        html = self._templates.get_template(template).render(common | values)
        return HTMLResponse(html.encode("utf-8", "backslashreplace"), status)

    async def _ask(
        self, request: Request, template: str, queue: str, choice: Choice, *, wrong: str, **values: Any
    ) -> Response:
        """Return the form for an operation, with the number of letters it will process."""
        reading = self._operations.reading(queue)
        count = None if reading is None else len(await run_in_threadpool(_matching, reading, choice))
        status = 400 if wrong else 200
        return self._page(request, template, status, queue=queue, choice=choice, count=count, wrong=wrong, **values)

    async def _open(
        self, request: Request, queue: str, fingerprint: str
    ) -> tuple[QueueReading, Letter, DeadMessage] | str:
        """Return a complete letter and its reading, or why it could not be read.

        The text is empty if there is no such letter. If the reading or the content is not kept, it is read again.
        """
        reading = self._operations.reading(queue)
        if reading is None:
            job = self._operations.read(queue, _user(request))
            await _end_of(job)
            reading = self._operations.reading(queue)
            if reading is None:
                return job.error or _NOT_READ
        letter = reading.find(fingerprint)
        if letter is None:
            return ""
        message = letter.message()
        if message is None:
            job = self._operations.read_letter(queue, fingerprint, _user(request))
            await _end_of(job)
            message = letter.message()
            if message is None:
                # A letter that was found is not kept if an operation has dropped the reading.
                return job.error or (_NOT_READ if job.count or not job.is_over else "")
        return reading, letter, message

    def _not_opened(self, request: Request, queue: str, problem: str) -> Response:
        if problem:
            return self._page(request, "error.html", 503, title=queue, text=problem, queue=queue)
        return self._page(request, "gone.html", 404, title="Letter", queue=queue)

    def _edit_form(
        self, request: Request, queue: str, fingerprint: str, name: str, body: bytes, wrong: str = "", status: int = 200
    ) -> Response:
        values = {"queue": queue, "id": fingerprint, "name": name, "body": body.decode(), "wrong": wrong}
        return self._page(request, "edit.html", status, title="Edit and replay", **values)

    async def _asked(self, request: Request) -> tuple[Fields, str]:
        """Return the fields of a form or an address, and the queue that they name.

        The page may open that queue for the request.
        """
        fields = await _form(request) if request.method == "POST" else Fields(request.url.query)
        queue = await run_in_threadpool(self._source.named, fields.typed("queue"))
        encode_short_string(queue, "queue")  # an invalid name in one address would break the list for all users
        if not is_text(queue) or not await run_in_threadpool(self._source.allows, queue):
            raise HTTPException(404, f"This page shows no queue “{queue}”.")
        if is_of_another_site(request) and queue not in await run_in_threadpool(self._source.names):
            raise HTTPException(403, f"A link of another site opens listed queues only: open “{queue}” by its name.")
        return fields, queue

    def _job(self, fields: Fields) -> Job:
        job = self._operations.jobs.get(fields.get("id"))
        if job is None:
            raise HTTPException(
                404, "This page no longer keeps this operation. An audit log, if there is one, has its result."
            )
        return job

    def _changing(self, queue: str) -> list[Job]:
        return [job for job in self._operations.jobs.of(queue) if job.kind != "read"]

    def _need_changes(self) -> None:
        if not self._allow_changes:
            raise HTTPException(403, "This page is read-only: it was started without allowing changes.")

    def _queue_rows(self) -> tuple[list[dict[str, object]], str]:
        names = self._source.names()
        self._operations.forget_others(names)
        try:
            depths, problem = self._source.depths(), self._source.problem
        except ReliableMQError as error:
            depths, problem = dict.fromkeys(names), str(error)
        rows: list[dict[str, object]] = []
        for name in names:
            depth = depths.get(name)
            if depth is not None:
                self._operations.read_alone(name, depth)
            jobs = self._operations.jobs.of(name)
            rows.append({"name": name, "depth": depth, "summary": self._operations.summary(name), "jobs": jobs})
        return rows, problem

    def _letters_view(self, reading: QueueReading, choice: Choice, page: int, all_groups: bool) -> dict[str, Any]:
        matching = _matching(reading, choice)
        pages = max((len(matching) + _ON_A_PAGE - 1) // _ON_A_PAGE, 1)
        page = min(page, pages)
        groups, shown = reading.groups(matching), _ALL_GROUPS if all_groups else _GROUPS
        return {
            "matching": len(matching),
            "letters": matching[(page - 1) * _ON_A_PAGE : page * _ON_A_PAGE],
            "page": page,
            "pages": pages,
            "groups": groups[:shown],
            "more_groups": len(groups) - shown,
        }

    def _letter_view(
        self, reading: QueueReading, letter: Letter, message: DeadMessage, choice: Choice, form: str
    ) -> dict[str, Any]:
        # Letters that are equal in every byte have one page, at the place of the first.
        matching = [each for each in _matching(reading, choice) if reading.find(each.fingerprint) is each]
        places = {each.position: place for place, each in enumerate(matching)}
        place = places.get(letter.position)
        properties = rows_of_properties(message)
        content_type = dict(properties).get("content type")
        return {
            "letter": letter,
            "message": message,
            "before": matching[place - 1] if place else None,
            "after": matching[place + 1] if place is not None and place + 1 < len(matching) else None,
            "body": body_as(message.body, form if form in FORMS else "", content_type),
            "headers": rows_of_headers(message),
            "properties": properties,
            "edit_problem": edit_problem(message.body),
        }

    def _redirect(self, request: Request, path: str) -> Response:
        return RedirectResponse(request.scope.get("root_path", "") + path, 303)

    def _to_reading(self, request: Request, job: Job, choice: str) -> Response:
        pairs = [("queue", job.queue), ("id", job.id), ("choice", choice)]
        return self._redirect(request, f"/reading?{encoded(pairs)}")

    def _to_job(self, request: Request, job: Job) -> Response:
        return self._redirect(request, f"/job?id={job.id}")

    async def _http_error(self, request: Request, error: HTTPException) -> Response:
        text = "There is no such page." if error.detail == "Not Found" else error.detail
        return self._page(request, "error.html", error.status_code, title="Error", text=text, queue="")

    async def _error(self, request: Request, error: Exception) -> Response:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        text = str(error) if isinstance(error, ReliableMQError) else getattr(error, "strerror", None) or str(error)
        return self._page(request, "error.html", status, title="Error", text=text, queue="")


def _shown(value: object) -> object:
    """Make text visible before it is escaped for HTML. Return markup unchanged."""
    return visible(value) if type(value) is str else value


async def _form(request: Request) -> Fields:
    """Read the form of a request. Its size is bounded."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "A form of this page was expected.")
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > _LARGEST_FORM:
                raise HTTPException(413, f"A form has at most {_LARGEST_FORM} bytes.")
    except ClientDisconnect as error:
        raise HTTPException(400, "The form did not arrive completely.") from error
    return Fields(bytes(data))


def _choice(fields: Fields) -> Choice:
    """Return the letters that a form selects."""
    which = fields.get("which")
    if which in ("", "all"):
        return _filter_of(fields)
    if which != "selected":
        raise ConfigurationError(f"which must be selected or all, not {which!r}")
    letters = [("letter", each) for each in fields.all("letter") if each.strip()]  # an empty filter selects all
    if not letters:
        raise ConfigurationError("no letter is selected: go back, and select some")
    return Choice.of_pairs(letters)


def _filter_of(form: Fields) -> Choice:
    """Return the filter in a form.

    A missing filter is an error, because the form would otherwise select all letters.
    """
    if not form.all("choice"):
        raise ConfigurationError("choice is missing: the filter of the letters, empty for all")
    return Choice.of(Fields(form.get("choice")))


def _options(fields: Fields, *, dry_run: bool) -> ReplayOptions:
    """Return the replay options in a form."""
    target = fields.get("target", "origin")
    to = fields.get("to") if target == "queue" else None
    if target not in ("origin", "queue", "published"):
        raise ConfigurationError(f"target must be origin, queue or published, not {target!r}")
    if to == "":
        raise ConfigurationError("the name of the other queue is missing")
    rate = None
    if fields.get("rate"):
        try:
            rate = float(fields.get("rate"))
        except ValueError:
            rate = 0.0
        if not 0.001 <= rate <= 1e6:
            raise ConfigurationError(f"rate must be a number of messages per second, not {fields.get('rate')!r}")
    return ReplayOptions(
        to=to, as_published=target == "published", rate=rate, limit=fields.number("limit"), dry_run=dry_run
    )


def _user(request: Request) -> str:
    """Return the user's name, which is empty on a page that needs none, as to sign in."""
    name: str = getattr(request.state, "reliable_mq_user", "")
    return name


async def _end_of(job: Job) -> None:
    """Wait for a job without a thread of the pool, which the whole service shares."""
    with anyio.move_on_after(_LETTER_WITHIN):
        while not job.is_over:  # noqa: ASYNC110  # it ends on a thread
            await anyio.sleep(_CHECKED_EVERY)


def _matching(reading: QueueReading, choice: Choice) -> Sequence[Letter]:
    return reading.matching(choice.filter, datetime.now(UTC))


class _Download(StreamingResponse):
    """A response with the content of an open file, which it closes.

    An iterator cannot close it: if the client leaves before the first chunk, the iterator is never started.
    """

    def __init__(self, descriptor: int, **options: Any) -> None:
        super().__init__(_content(descriptor), **options)
        self._descriptor = descriptor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._descriptor)  # no thread reads it now: a cancelled read is waited for


def _content(descriptor: int) -> Iterator[bytes]:
    """Yield the content of an open file."""
    place = 0
    while data := os.pread(descriptor, 65536, place):
        yield data
        place += len(data)


def _file_name(queue: str) -> str:
    return "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in queue)[:100]


def _attachment(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}


def _parsed(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        return None
