"""A real Chromium, driven through its own debugging protocol over a pair of pipes.

No driver, no socket, no package: `--remote-debugging-pipe` speaks JSON ended by a zero byte. What a
tab asked the network for and what it said on its console are kept, so that a test can demand that
there be none.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-features=Translate,OptimizationHints,MediaRouter,DialMediaRouteProvider",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--remote-debugging-pipe",
)
_SLOW = 30.0
_KEYS = {
    "Enter": (13, "\r"),
    "Tab": (9, "\t"),
    "Escape": (27, ""),
    "ArrowDown": (40, ""),
    "ArrowUp": (38, ""),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
    "Home": (36, ""),
    "End": (35, ""),
    "PageDown": (34, ""),
    "PageUp": (33, ""),
    " ": (32, " "),
}


def chromium() -> str | None:
    """Where Chromium is; None without one."""
    wanted = os.environ.get("CHROMIUM")
    for name in (wanted, *NAMES) if wanted else NAMES:
        if found := shutil.which(name):
            return found
    return None


class PageTrouble(AssertionError):
    """The page did not do what was asked of it."""


class Browser:
    """One Chromium with an empty profile; tabs of it know nothing of each other."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="driftline-chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # High numbers first: what is put at 3 must not be what has yet to be put at 4.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 64) for end in (theirs_in, theirs_out)]
        silence = os.open(os.devnull, os.O_RDWR)
        words = [program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        actions: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_DUP2, silence, 0),
            (os.POSIX_SPAWN_DUP2, silence, 1),
            (os.POSIX_SPAWN_DUP2, silence, 2),
            (os.POSIX_SPAWN_DUP2, ends[0], 3),
            (os.POSIX_SPAWN_DUP2, ends[1], 4),
        ]
        self.pid = os.posix_spawn(program, words, os.environ, file_actions=actions, setpgroup=0)
        for end in (theirs_in, theirs_out, *ends, silence):
            os.close(end)
        self._changed = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._tabs: dict[str, Tab] = {}
        self._number = 0
        self._ended = False
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.version = self.ask("Browser.getVersion")["product"]
        except PageTrouble:
            self.close()
            raise

    def ask(
        self, method: str, *, session: str = "", timeout: float = _SLOW, **params: Any
    ) -> dict[str, Any]:
        """One question of the protocol, answered."""
        with self._changed:
            self._number += 1
            number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        end = time.monotonic() + timeout
        with self._changed:
            while number not in self._answers:
                if self._ended or not self._changed.wait(max(0.0, end - time.monotonic())):
                    raise PageTrouble(f"{method}: no answer")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise PageTrouble(f"{method}: {answer['error'].get('message')}")
        return answer["result"]

    def tab(self, *, width: int = 1280, height: int = 800) -> Tab:
        """A new tab with a profile of its own."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)
        found = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = Tab(self, found["sessionId"], context)
        self._tabs[tab.session] = tab
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.ask(f"{domain}.enable")
        tab.size(width, height)
        tab.theme("light")
        return tab

    def close(self) -> None:
        with contextlib.suppress(PageTrouble, OSError):
            self.ask("Browser.close", timeout=5.0)
        end = time.monotonic() + 5.0
        while time.monotonic() < end and os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _listen(self) -> None:
        rest = b""
        while True:
            try:
                data = os.read(self._in, 1 << 20)
            except OSError:
                data = b""
            if not data:
                break
            *whole, rest = (rest + data).split(b"\0")
            for message in map(json.loads, whole):
                with self._changed:
                    if "id" in message:
                        self._answers[message["id"]] = message
                    elif tab := self._tabs.get(message.get("sessionId", "")):
                        tab.events.append(message)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        os.close(self._in)


class Tab:
    """One page.

    Attributes:
        events: Everything the protocol said about it, oldest first.
    """

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self.browser = browser
        self.session = session
        self._context = context
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.ask(method, session=self.session, **params)

    def close(self) -> None:
        self.browser.ask("Target.disposeBrowserContext", browserContextId=self._context)

    def of(self, method: str) -> list[dict[str, Any]]:
        """What was said under one heading."""
        return [event["params"] for event in list(self.events) if event["method"] == method]

    @property
    def requests(self) -> list[str]:
        """Every address that was asked for, but what a page holds itself."""
        found = [event["request"]["url"] for event in self.of("Network.requestWillBeSent")]
        found += [event["url"] for event in self.of("Network.webSocketCreated")]
        return [url for url in found if not url.startswith(("data:", "blob:", "about:"))]

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of its console, exceptions nobody caught, blocked resources."""
        found = [
            " ".join(str(one.get("value", one.get("description"))) for one in event["args"])
            for event in self.of("Runtime.consoleAPICalled")
            if event["type"] in ("error", "warning", "assert")
        ]
        for event in self.of("Runtime.exceptionThrown"):
            details = event["exceptionDetails"]
            found.append(details.get("exception", {}).get("description", details["text"]))
        for event in self.of("Log.entryAdded"):
            if event["entry"]["level"] in ("error", "warning"):
                found.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
        return found

    def go(self, where: str | Path) -> None:
        """Open an address, or a file, and wait until it is loaded."""
        url = where.resolve().as_uri() if isinstance(where, Path) else where
        before = len(self.of("Page.loadEventFired"))
        answer = self.ask("Page.navigate", url=url)
        if "errorText" in answer:
            raise PageTrouble(f"{url}: {answer['errorText']}")
        if "loaderId" in answer:  # else only the fragment changed
            self._until(lambda: len(self.of("Page.loadEventFired")) > before, f"{url} to load")

    def reload(self) -> None:
        before = len(self.of("Page.loadEventFired"))
        self.ask("Page.reload")
        self._until(lambda: len(self.of("Page.loadEventFired")) > before, "the page to load again")

    def eval(self, script: str) -> Any:
        """The value of an expression; a promise's value once it is there."""
        answer = self.ask(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            said = details.get("exception", {}).get("description", details["text"])
            raise PageTrouble(f"{script[:200]}: {said}")
        return answer["result"].get("value")

    def wait(self, script: str, timeout: float = _SLOW) -> Any:
        """Until an expression is true; its value."""
        end = time.monotonic() + timeout
        while True:
            value = self.eval(script)
            if value:
                return value
            if time.monotonic() > end:
                said = "; ".join(self.complaints[:3])
                raise PageTrouble(f"waited for {script[:300]}" + (f" ({said})" if said else ""))
            time.sleep(0.02)

    def there(self, selector: str, timeout: float = _SLOW) -> None:
        """Until an element is there."""
        self.wait(f"!!document.querySelector({json.dumps(selector)})", timeout)

    def text(self, selector: str = "body") -> str:
        """What a person reads in an element."""
        return self.eval(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element, scrolled into view."""
        box = self.eval(
            f"""(() => {{
              const found = document.querySelector({json.dumps(selector)});
              if (!found) return null;
              found.scrollIntoView({{block: "nearest", inline: "nearest", behavior: "instant"}});
              const box = found.getBoundingClientRect();
              return [box.left, box.top, box.width, box.height];
            }})()"""
        )
        if box is None:
            raise PageTrouble(f"there is no {selector}")
        return tuple(box)

    def click(self, selector: str, *, across: float = 0.5, down: float = 0.5) -> None:
        """A real click of the mouse on an element, in its middle unless said otherwise."""
        left, top, width, height = self.place(selector)
        x, y = left + width * across, top + height * down
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)

    def hover(self, selector: str, *, across: float = 0.5, down: float = 0.5) -> None:
        left, top, width, height = self.place(selector)
        self.mouse("mouseMoved", left + width * across, top + height * down)

    def drag(
        self, selector: str, start: Sequence[float], stop: Sequence[float], **more: Any
    ) -> None:
        """Press at one place of an element, given in parts of it, and let go at another."""
        left, top, width, height = self.place(selector)
        x, y = left + width * start[0], top + height * start[1]
        far_x, far_y = left + width * stop[0], top + height * stop[1]
        self.mouse("mouseMoved", x, y, **more)
        self.mouse("mousePressed", x, y, button="left", clickCount=1, **more)
        for part in (0.3, 0.7, 1.0):
            at = (x + (far_x - x) * part, y + (far_y - y) * part)
            self.mouse("mouseMoved", *at, button="left", buttons=1, **more)
        self.mouse("mouseReleased", far_x, far_y, button="left", clickCount=1, **more)

    def wheel(
        self, selector: str, by: float, *, across: float = 0.5, down: float = 0.5, **more: Any
    ) -> None:
        left, top, width, height = self.place(selector)
        x, y = left + width * across, top + height * down
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=by, **more)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def write(self, text: str) -> None:
        """Type into whatever has the focus."""
        self.ask("Input.insertText", text=text)

    def press(self, key: str, **more: Any) -> None:
        """One key, such as `ArrowDown` or `j`."""
        code, text = _KEYS.get(key, (ord(key[0].upper()), key if len(key) == 1 else ""))
        about = {"key": key, "windowsVirtualKeyCode": code, **more}
        kind = "keyDown" if text else "rawKeyDown"
        self.ask("Input.dispatchKeyEvent", type=kind, text=text, **about)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **about)

    def size(self, width: int, height: int, *, scale: float = 1.0) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def theme(self, name: str, *, media: str = "") -> None:
        """`light` or `dark`, as the reader's system asks for; `media`: `print`."""
        features = [
            {"name": "prefers-color-scheme", "value": name},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)

    def picture(self, path: Path, *, whole: bool = False) -> Path:
        """A screenshot; of the whole page, however long, if asked."""
        if whole:
            self.eval("scrollTo({top: 0, behavior: 'instant'})")
        answer = self.ask(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, fromSurface=True
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    def _until(self, holds: Any, what: str, timeout: float = _SLOW) -> None:
        end = time.monotonic() + timeout
        while not holds():
            if time.monotonic() > end:
                raise PageTrouble(f"waited for {what}")
            time.sleep(0.01)
