"""Addresses as a person types them: HOST, HOST:PORT, an IPv6 address, or [IPv6]:PORT."""

import re

from andon.errors import UserError


def parse_address(text: str) -> tuple[str, int | None]:
    """The host and, if it is given, the port of an address."""
    found = re.fullmatch(r"\[([0-9a-fA-F:.%\w]+)\](?::([0-9]{1,5}))?|([^:\[\]\s]+)(?::([0-9]{1,5}))?", text, re.ASCII)
    if not found and re.fullmatch("[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*", text):
        return text, None
    port = (found[2] or found[4]) if found else None
    if not found or (port and int(port) > 65535):
        raise UserError(f"{text!r} is not an address", "It must be HOST or HOST:PORT", "For example 127.0.0.1:29411")
    return found[1] or found[3], int(port) if port else None


def address_text(host: str, port: int) -> str:
    """HOST:PORT, as a person types it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
