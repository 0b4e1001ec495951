"""``holdfast top`` on a terminal: one run in tabs, or a folder of runs, by Textual.

Files are read in a thread, so that neither a long run nor a slow disk holds up a key; what was read
last stays on the screen, with the reason where nothing more can be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane

from runner.system.process import in_thread
from runner.system.units import counted
from runner.tools.report import terminal
from runner.tools.report.markup import plain
from runner.tools.report.run_reader import RunReader, RunStatus
from runner.tools.report.terminal import Listing
from runner.tools.report.vitals import Runs, is_run

_TICK_SECONDS = 0.25
_COLUMNS = 256
_TABS = ("now", "incidents", "ranks", "checkpoints", "log")
_ROWS_A_LOOK = 4096  # between two looks at whether the screen was closed
_HELP = """\
1 2 3 4 5, Tab   now, incidents, ranks, checkpoints, log
arrows, PgUp, PgDn, Home, End   scroll
Enter            open the incident, the line or the run
Esc              back
?                these keys
q, Ctrl-C        end; the run goes on
"""


class Card(ModalScreen[None]):
    """A text over the screen; any of its keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,enter,q,question_mark", "dismiss", "close")]
    DEFAULT_CSS = """
    Card { align: center middle; }
    Card > VerticalScroll { width: 90%; height: auto; max-height: 85%; border: round $primary; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=True):
            yield Static(Text(plain(self._text)))
        yield Footer()


class _Rows(DataTable[Text]):
    """A listing, whose cursor stays on its row while others come."""

    def __init__(self) -> None:
        super().__init__(cursor_type="row", zebra_stripes=True)
        self._shown: Listing | None = None
        self._wide: list[int] = []

    def show(self, listing: Listing) -> None:
        wide = terminal.widths(listing.heads, listing.rows, self.app.size.width - 2)
        if (listing, wide) == (self._shown, self._wide):
            return
        at, y = self.selected(), self.scroll_y
        self.clear(columns=True)
        for head, width in zip(listing.heads, wide, strict=True):
            self.add_column(head, width=width)
        self._shown, self._wide = listing, wide
        for row in listing.rows:
            self.add_row(*terminal.cells_of(row), key=row.key)
        keys = [row.key for row in listing.rows]
        if at is not None and at.key in keys and keys.index(at.key) > 0:
            self.move_cursor(row=keys.index(at.key), scroll=False)
            self.scroll_to(y=y, animate=False)

    def selected(self) -> terminal.Row | None:
        """The row under the cursor."""
        rows = self._shown.rows if self._shown is not None else ()
        return rows[self.cursor_row] if 0 <= self.cursor_row < len(rows) else None


class _Following(Screen[None]):
    """Reads again and again in a thread, and shows what was read."""

    DEFAULT_CSS = "_Following #state { height: 1; background: $panel; }"

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._due = 0.0
        self._reading: Future[Any] | None = None
        self._is_closed = False

    def on_mount(self) -> None:
        self.set_interval(min(_TICK_SECONDS, self._seconds), self._tick)
        self._tick()

    def on_unmount(self) -> None:
        self._is_closed = True

    def _tick(self) -> None:
        if self._reading is None:
            if time.monotonic() >= self._due:
                self._reading = in_thread(self.read, "top")
            return
        if not self._reading.done():
            self.show_progress()
            return
        reading, self._reading = self._reading, None
        self._due = time.monotonic() + self._seconds
        try:
            self.show(reading.result())
        except Exception as error:  # whatever the files hold: the next look may do
            self.tell(f"cannot be read: {error}")

    def read(self) -> Any:
        """In the thread: read what is new."""
        raise NotImplementedError

    def show(self, told: Any) -> None:
        """Show what :meth:`read` returned."""
        raise NotImplementedError

    def show_progress(self) -> None:
        """Called while it reads."""

    def tell(self, words: str) -> None:
        """A sentence on the first line."""
        self.query_one("#state", Static).update(
            Text(plain(words), no_wrap=True, overflow="ellipsis")
        )


class RunScreen(_Following):
    """One run in tabs."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *((str(place), f"tab('{name}')", name) for place, name in enumerate(_TABS, start=1)),
        ("escape", "app.leave", "back"),
    ]
    DEFAULT_CSS = """
    RunScreen TabbedContent { height: 1fr; }
    RunScreen ContentSwitcher, RunScreen TabPane { height: 1fr; padding: 0; }
    """

    def __init__(self, out: Path, seconds: float) -> None:
        super().__init__(seconds)
        self._out = out
        self._run: RunReader | None = None
        self._has_read = False

    def compose(self) -> ComposeResult:
        yield Static("reading", id="state")
        with TabbedContent():
            for name in _TABS:
                with TabPane(name, id=name):
                    if name == "now":
                        with VerticalScroll(can_focus=True):
                            yield Static(id="text")
                    else:
                        yield _Rows()
        yield Footer()

    def read(self) -> str:
        if not self._out.is_dir():
            return f"The folder is gone; this is how it was: {self._out}"
        self._run = self._run or RunReader(self._out, columns=_COLUMNS)
        for count, _ in enumerate(self._run.iter_update()):
            if count % _ROWS_A_LOOK == 0 and self._is_closed:
                break
        return ""

    def show_progress(self) -> None:
        if self._run is not None and not self._has_read:
            done, total = self._run.read_bytes
            self.tell(f"reading {done / max(1, total):.0%}")

    def show(self, told: str) -> None:
        if told or self._run is None:
            self.tell(told)
            return
        self._has_read = True
        now = RunStatus(self._run)
        self.tell(f"{self._out.name or self._out}: {now.state()}. {now.when()}")
        self._draw()

    def _draw(self) -> None:
        run = self._run
        assert run is not None, "it was read"
        self.query_one("#text", Static).update(Group(*terminal.now_parts(run, self.size.width - 4)))
        for name in _TABS[1:]:
            self.query_one(f"#{name} _Rows", _Rows).show(getattr(terminal, name)(run))

    def on_resize(self) -> None:
        if self._has_read and self._reading is None:
            self._draw()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        row = event.data_table.selected() if isinstance(event.data_table, _Rows) else None
        if row is not None and row.detail:
            self.app.push_screen(Card(row.detail))

    def action_tab(self, name: str) -> None:
        self.query_one(TabbedContent).active = name
        self.query_one(f"#{name}").query("_Rows, VerticalScroll").first().focus()


class RunsScreen(_Following):
    """A line for each run of a folder."""

    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__(seconds)
        self._folder = folder
        self._runs = Runs([folder])

    def compose(self) -> ComposeResult:
        yield Static("reading", id="state")
        yield _Rows()
        yield Footer()

    def read(self) -> Listing:
        return terminal.runs(self._runs.update())

    def show(self, told: Listing) -> None:
        words = (
            f"{self._folder}: {counted(len(told.rows), 'run')}, as of {time.strftime('%H:%M:%S')}"
        )
        if not told.rows:
            words = f"{self._folder}: no run yet; those that begin are shown"
        if self._runs.unread:
            words = f"cannot be read: {', '.join(self._runs.unread)}"
        self.tell(words)
        self.query_one(_Rows).show(told)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        row = self.query_one(_Rows).selected()
        if row is not None:
            self.app.push_screen(RunScreen(Path(row.key), self._seconds))


class Top(App[None]):
    """The application; ends at ``q``.

    Args:
        out: a run's directory, or a folder of runs.
        seconds: between two looks at the files.
    """

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "quit"),
        ("ctrl+c", "quit", "quit"),
        ("question_mark", "keys", "keys"),
    ]

    def __init__(self, out: Path, seconds: float) -> None:
        super().__init__()
        self._out, self._seconds = out, seconds

    def on_mount(self) -> None:
        make: Callable[[Path, float], Screen[None]] = RunScreen if is_run(self._out) else RunsScreen
        self.push_screen(make(self._out, self._seconds))

    def action_keys(self) -> None:
        self.push_screen(Card(_HELP))

    def action_leave(self) -> None:
        """From a run to the list that it was opened from."""
        if isinstance(self.screen, RunScreen) and len(self.screen_stack) > 2:
            self.pop_screen()
