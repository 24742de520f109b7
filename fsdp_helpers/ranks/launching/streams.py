"""A rank's standard output and error, which travel to the parent line by line."""

import codecs
import io
import os
import threading
import uuid
from collections.abc import Callable
from typing import Any


class LineSender(io.TextIOBase):
    """A text stream that passes on whole lines, so that the ranks' lines never mix.

    `buffer` takes bytes, and `fileno()` is a file that another process can write to: `subprocess.run(command,
    stdout=sys.stdout)`. What arrives in either way is passed on as lines too.
    """

    encoding, errors = "utf-8", "replace"

    def __init__(self, send_line: Callable[[str], None]) -> None:
        self._send_line, self._line = send_line, ""
        self._pipe: _Pipe | None = None
        self.buffer = _Bytes(self)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._send_line(line)
        return len(text)

    def flush(self) -> None:
        """Do nothing: a line is sent when it is complete."""

    def fileno(self) -> int:
        if self._pipe is None:
            self._pipe = _Pipe(self._send_line)
        return self._pipe.write_end

    def send_rest(self) -> None:
        """Pass on what has arrived so far, even an unfinished line."""
        if self._line:
            self.write("\n")
        if self._pipe is not None:
            self._pipe.drain()


class _Bytes(io.RawIOBase):
    """The bytes beneath a text stream; a character may arrive in two parts."""

    def __init__(self, text: LineSender) -> None:
        self._text, self._decoder = text, codecs.getincrementaldecoder(text.encoding)(text.errors)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._text.write(self._decoder.decode(bytes(data)))
        return memoryview(data).nbytes

    def fileno(self) -> int:
        return self._text.fileno()


class _Pipe:
    """A file for other processes to write to, and a thread that passes their lines on."""

    def __init__(self, send_line: Callable[[str], None]) -> None:
        self._read_end, self.write_end = os.pipe()
        self._send_line, self._last = send_line, uuid.uuid4().hex
        self._thread = threading.Thread(target=self._hand_on, name="lines of other processes", daemon=True)
        self._thread.start()

    def _hand_on(self) -> None:
        with open(self._read_end, encoding=LineSender.encoding, errors=LineSender.errors) as lines:
            for line in lines:
                text = line.removesuffix("\n")
                rest = text.removesuffix(self._last)
                if rest or not text:
                    self._send_line(rest)
                if rest != text:
                    return

    def drain(self) -> None:
        """Wait until everything written has been passed on, whoever else still has the file open."""
        os.write(self.write_end, f"{self._last}\n".encode())
        self._thread.join()
