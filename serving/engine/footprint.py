"""What a server will take, bucket by bucket, as a table: `tidegate serve --dry-run`."""

from dataclasses import dataclass

from serving.batch import Bucket

_MB = 1e6


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """`temp_bytes`: memory that a run needs beside its arguments, as the compiler says; results included."""

    bucket: Bucket
    compile_s: float
    temp_bytes: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one device, and the compiled programs in the order of their buckets."""

    weight_bytes: int
    table_bytes: int
    page_bytes: int
    num_pages: int
    pages_per_row: int  # of a request of full length
    programs: tuple[ProgramCost, ...]

    def render(self) -> str:
        """Lines for people; sizes in MB, times in seconds."""
        lines = [f"{'bucket':8} {'rows':>5} {'tokens':>7} {'pages':>6} {'memory MB':>10} {'compile s':>10}"]
        for program in self.programs:
            b = program.bucket
            sizes = f"{program.temp_bytes / _MB:>10.1f} {program.compile_s:>10.2f}"
            lines.append(f"{b.kind:8} {b.rows:>5} {b.tokens:>7} {b.pages:>6} {sizes}")
        peak = max((program.temp_bytes for program in self.programs), default=0)
        cache = self.num_pages * self.page_bytes
        total = self.weight_bytes + self.table_bytes + cache + peak
        lines += [
            f"weights       {self.weight_bytes / _MB:12.1f} MB",
            f"KV cache      {cache / _MB:12.1f} MB  {self.num_pages} pages of {self.page_bytes} bytes",
            f"one request   {self.pages_per_row * self.page_bytes / _MB:12.1f} MB  {self.pages_per_row} pages at most",
            f"logit tables  {self.table_bytes / _MB:12.1f} MB",
            f"largest step  {peak / _MB:12.1f} MB",
            f"in all        {total / _MB:12.1f} MB, {len(self.programs)} buckets, "
            f"{sum(program.compile_s for program in self.programs):.1f} s of compiling",
        ]
        return "\n".join(lines)
