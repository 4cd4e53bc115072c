"""Page size and layout of the KV cache of an engine's release.

Explicit page sizes are legal if the preferred attention kernel supports them. Valid: models whose
layers all have one kind of cache. The sizes and their sources are in kv.py of every engine's
folder.
"""

from dataclasses import dataclass

from tuner.devices.datasheet import Generation
from tuner.engines.serve_rules.kv_connectors import CacheKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalPages:
    """Page sizes that a release's preferred kernels support."""

    multiple_of: int = 1
    among: tuple[int, ...] = ()
    """Empty: any that are multiples."""

    def __str__(self) -> str:
        """The rule, for people."""
        if self.among:
            return f"attention kernels take pages of {', '.join(map(str, self.among))} tokens"
        return f"attention kernels take pages of whole multiples of {self.multiple_of} tokens"

    def holds(self, page: int) -> bool:
        """Say whether pages of so many tokens are legal."""
        return page % self.multiple_of == 0 and (not self.among or page in self.among)


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultPage:
    """The page of some caches on some devices."""

    tokens: int
    legal: LegalPages
    """Sizes that may be stated instead."""
    cache: CacheKind | None = None
    """None: every kind."""
    generation: Generation | None = None
    """None: every device that the release serves on."""
    dtype: str = ""
    """Of the cache, bf16 or fp8; empty: both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPages:
    """The pages of a release."""

    layout: str = ""
    """nhd or hnd; not applicable to latent caches; empty: not known."""
    defaults: tuple[DefaultPage, ...] = ()
    """The first that fits counts."""
    legal_anywhere: LegalPages | None = None
    """Sizes that all its devices support; None: not known."""

    def default(self, *, cache: CacheKind, generation: Generation, dtype: str) -> int | None:
        """Return the tokens of a page; None if not known."""
        page = self._page(cache, generation, dtype)
        return None if page is None else page.tokens

    def legal(
        self, *, cache: CacheKind, generation: Generation | None, dtype: str
    ) -> LegalPages | None:
        """Return the legal page sizes; None if not known.

        Args:
            cache: kind of KV cache.
            generation: of the device; None if not known.
            dtype: of the cache, bf16 or fp8.
        """
        if generation is None:
            return self.legal_anywhere
        page = self._page(cache, generation, dtype)
        return None if page is None else page.legal

    def _page(self, cache: CacheKind, generation: Generation, dtype: str) -> DefaultPage | None:
        fits = (
            page
            for page in self.defaults
            if page.cache in (None, cache)
            and page.generation in (None, generation)
            and page.dtype in ("", dtype)
        )
        return next(fits, None)
