#!/usr/bin/env python3
"""Compiles kernels/*.cu to kernels/ptx/*.ptx with a pinned NVRTC; no GPU is needed.

Run through scripts/build-kernels, which installs the pinned compilers and passes their places. With --check
nothing is written: committed PTX that differs from what the sources give is an error, and each PTX is
assembled for the architectures of ARCHITECTURES. With --table prints the registers, shared memory and spills
of every kernel.
"""

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KERNELS = os.path.join(ROOT, "kernels")
# The oldest architecture served; its PTX is compiled by the driver for newer ones.
BASELINE = "compute_80"
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]


class Nvrtc:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name, *args):
        status = getattr(self.lib, name)(*args)
        if status != 0:
            raise RuntimeError(f"{name}: {self.lib.nvrtcGetErrorString(status).decode()}")

    def _text(self, program, size_of, get):
        size = ctypes.c_size_t()
        self._call(size_of, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(get, program, buffer)
        return buffer.value.decode()

    def ptx(self, name, source, headers, options):
        """PTX of one translation unit. Headers are passed by content, so no path can reach the output."""
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * len(headers))(*[key.encode() for key in headers])
        texts = (ctypes.c_char_p * len(headers))(*[text.encode() for text in headers.values()])
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names)
        arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = self.lib.nvrtcCompileProgram(program, len(options), arguments)
        log = self._text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").strip()
        if status != 0:
            raise SystemExit(f"{name}: does not compile\n{log}")
        if log:
            print(log, file=sys.stderr)
        ptx = self._text(program, "nvrtcGetPTXSize", "nvrtcGetPTX")
        self._call("nvrtcDestroyProgram", ctypes.byref(program))
        return ptx


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def assemble(ptxas, path, architecture):
    """ptxas' report on one PTX file, or an exit that says which file and architecture failed."""
    with tempfile.TemporaryDirectory() as scratch:
        cubin = os.path.join(scratch, "out.cubin")
        run = subprocess.run([ptxas, "-v", f"-arch={architecture}", path, "-o", cubin], capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"{os.path.relpath(path, ROOT)}: does not assemble for {architecture}\n{run.stdout}{run.stderr}")
    return run.stdout + run.stderr


def resources(report):
    """{kernel: (registers, shared bytes, spilled bytes)} of ptxas' report."""
    found = {}
    kernel, spills = None, 0
    for line in report.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel, spills = match.group(1), 0
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = int(match.group(1)) + int(match.group(2))
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found[kernel] = (int(match.group(1)), int(shared.group(1)) if shared else 0, spills)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvrtc", required=True, help="libnvrtc.so of the pinned version")
    parser.add_argument("--ptxas", required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--define", action="append", default=[], metavar="NAME=VALUE", help="a kernel's constant, for experiments")
    parser.add_argument("--out", default=os.path.join(KERNELS, "ptx"), help="where to write (kernels/ptx)")
    parser.add_argument("names", nargs="*", help="only these kernels (blake3, not kernels/blake3.cu)")
    options = parser.parse_args()

    entries = sorted(os.listdir(KERNELS))
    headers = {name: read(os.path.join(KERNELS, name)) for name in entries if name.endswith(".cuh")}
    sources = [name for name in entries if name.endswith(".cu") and (not options.names or name[:-3] in options.names)]
    if not sources:
        sys.exit(f"no kernels to build: {KERNELS} holds no .cu of those names")
    nvrtc = Nvrtc(options.nvrtc)
    flags = [f"--gpu-architecture={BASELINE}", "--std=c++17"] + [f"--define-macro={define}" for define in options.define]
    os.makedirs(options.out, exist_ok=True)
    stale = []
    for name in sources:
        ptx = nvrtc.ptx(name, read(os.path.join(KERNELS, name)), headers, flags)
        path = os.path.join(options.out, name[:-3] + ".ptx")
        if options.check:
            if not os.path.exists(path):
                stale.append(f"{os.path.relpath(path, ROOT)} is missing")
            elif read(path) != ptx:
                stale.append(f"{os.path.relpath(path, ROOT)} is not what kernels/{name} compiles to")
        else:
            with open(path, "w", encoding="utf-8") as file:
                file.write(ptx)
    orphans = {name[:-4] + ".cu" for name in os.listdir(options.out) if name.endswith(".ptx")} - set(entries)
    stale += [f"kernels/ptx/{name[:-3]}.ptx has no source kernels/{name}" for name in sorted(orphans)]
    if stale:
        sys.exit("\n".join(stale + ["run scripts/build-kernels and commit what it writes"]))

    if options.check or options.table:
        found = {}
        for name in sources:
            path = os.path.join(options.out, name[:-3] + ".ptx")
            for architecture in ARCHITECTURES:
                for kernel, row in resources(assemble(options.ptxas, path, architecture)).items():
                    found.setdefault(kernel, {})[architecture] = row
        incomplete = [kernel for kernel, rows in found.items() if len(rows) != len(ARCHITECTURES)]
        if not found or incomplete:
            sys.exit(f"the assembler's report was not understood: {incomplete or 'no kernel in it'}")
        if options.table:
            print("| kernel | shared bytes | " + " | ".join(f"registers {a}" for a in ARCHITECTURES) + " | spilled bytes |")
            print("|---|---|" + "---|" * (len(ARCHITECTURES) + 1))
            for kernel, rows in found.items():
                cells = [str(rows[a][0]) for a in ARCHITECTURES]
                spills = max(row[2] for row in rows.values())
                print(f"| {kernel} | {rows['sm_90'][1]} | " + " | ".join(cells) + f" | {spills} |")
        print(f"{len(sources)} files, {len(found)} kernels: current, and assembled for {', '.join(ARCHITECTURES)}", file=sys.stderr)


if __name__ == "__main__":
    main()
