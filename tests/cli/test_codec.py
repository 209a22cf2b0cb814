"""Commands about a mesh with a codec: they show what they can decode, and say what they cannot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import worqr
from tests.cli.conftest import Answer
from tests.support.servers import Server
from worqr.codecs import Fernet

Beside = Callable[..., Awaitable[Answer]]
KEY = "b1Yx5rkyEFXDoTxFxGN1sAFZoqRGoeYbNSDxhqRhD-k="
APP = f"import worqr\nfrom worqr.codecs import Fernet\nmesh = worqr.Mesh(codec=Fernet({KEY!r}))\nplain = worqr.Mesh()\n"


@pytest.mark.leaves("{mails}*")
async def test_a_command_decodes_and_encodes_with_the_codec_of_a_mesh_alone(
    beside: Beside, server: Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sealed_app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    sealed = worqr.Mesh(server.url, prefix=prefix, codec=Fernet(KEY), accept_plain=False)
    async with sealed.connect():
        await sealed.queue("mails").dispatch(b"to ada", id="m")
        answer = await beside("jobs", "mails")
        assert "to ada" not in answer.out
        assert "encoded (Fernet, key " in answer.out
        assert '"encoded":' in (await beside("jobs", "mails", "--json")).out.replace(": ", ":")
        assert "to ada" in (await beside("jobs", "mails", "--codec", "sealed_app:mesh")).out
        answer = await beside("enqueue", "mails", "to bob", "--codec", "sealed_app:mesh")
        assert answer.code == 0
        assert b"to bob" in await sealed.queue("mails").tasks()
        assert b"to bob" not in repr(server.client().lrange(f"{prefix}:{{mails}}", 0, -1)).encode()
        answer = await beside("queues", "--codec", "sealed_app:plain")
        assert (answer.code, "no mesh that has a codec" in answer.err) == (2, True)
        await sealed.queue("mails").delete()
