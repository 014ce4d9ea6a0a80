"""The STANDARD rules of buf lint and a comment on everything, checked on descriptors: buf itself is
no Python package.
"""

import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

ROOT = Path(__file__).parents[2] / "protos"
PASCAL = re.compile(r"[A-Z][A-Za-z0-9]*")
SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UPPER_SNAKE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
VERSIONED = re.compile(r"v[1-9][0-9]*((alpha|beta)[1-9][0-9]*)?")


def compile_protos(root: Path, folder: Path) -> FileDescriptorSet:
    out = folder / "descriptors.bin"
    protos = sorted(map(str, root.rglob("*.proto")))
    includes = [f"-I{root}", f"-I{files('grpc_tools') / '_proto'}"]
    command = ["protoc", *includes, f"--descriptor_set_out={out}", "--include_source_info"]
    assert protoc.main([*command, *protos]) == 0
    return FileDescriptorSet.FromString(out.read_bytes())


def lint(descriptors: FileDescriptorSet) -> list[str]:
    """Returns a line per broken rule: `path: name: rule`."""
    found = [line for file in descriptors.file for line in lint_file(file)]
    uses: dict[str, list[str]] = {}
    for file in descriptors.file:
        for service in file.service:
            for method in service.method:
                for kind in (method.input_type, method.output_type):
                    uses.setdefault(kind, []).append(f"{service.name}.{method.name}")
    found += [
        f"{kind}: shared by {', '.join(users)}" for kind, users in uses.items() if len(users) > 1
    ]
    return found


def lint_file(file: FileDescriptorProto) -> Iterator[str]:
    comments = {
        tuple(location.path): location.leading_comments or location.trailing_comments
        for location in file.source_code_info.location
    }

    def check(fits: Any, name: str, rule: str) -> Iterator[str]:
        if not fits:
            yield f"{file.name}: {name}: {rule}"

    folder, _, base = file.name.rpartition("/")
    yield from check(file.syntax == "proto3", file.name, "syntax is proto3")
    yield from check(file.package, file.name, "has a package")
    yield from check(
        file.package.replace(".", "/") == folder, file.package, "package is the folder"
    )
    yield from check(
        VERSIONED.fullmatch(file.package.rpartition(".")[2]), file.package, "package has a version"
    )
    yield from check(
        all(SNAKE.fullmatch(part) for part in file.package.split(".")), file.package, "snake case"
    )
    yield from check(SNAKE.fullmatch(base.removesuffix(".proto")), file.name, "snake case")
    yield from check(not file.public_dependency, file.name, "no public import")
    yield from check(not file.weak_dependency, file.name, "no weak import")
    types = set(used_types(file.message_type)) | {
        kind
        for service in file.service
        for method in service.method
        for kind in (method.input_type, method.output_type)
    }
    for imported in file.dependency:
        package = "." + imported.rpartition("/")[0].replace("/", ".") + "."
        yield from check(any(t.startswith(package) for t in types), imported, "import is used")
    for i, message in enumerate(file.message_type):
        yield from lint_message(message, (4, i), comments, check)
    for i, enum in enumerate(file.enum_type):
        yield from lint_enum(enum, (5, i), comments, check)
    for i, service in enumerate(file.service):
        yield from check(PASCAL.fullmatch(service.name), service.name, "pascal case")
        yield from check(service.name.endswith("Service"), service.name, "ends with Service")
        yield from check(comments.get((6, i)), service.name, "has a comment")
        for j, method in enumerate(service.method):
            yield from check(PASCAL.fullmatch(method.name), method.name, "pascal case")
            yield from check(comments.get((6, i, 2, j)), method.name, "has a comment")
            for kind, suffix in ((method.input_type, "Request"), (method.output_type, "Response")):
                name = kind.rpartition(".")[2]
                stem = (method.name + suffix, service.name + method.name + suffix)
                yield from check(name in stem, name, f"is named {stem[0]}")


def lint_message(
    message: DescriptorProto, path: tuple[int, ...], comments: dict[Any, str], check: Any
) -> Iterator[str]:
    if message.options.map_entry:
        return
    yield from check(PASCAL.fullmatch(message.name), message.name, "pascal case")
    yield from check(comments.get(path), message.name, "has a comment")
    for i, field in enumerate(message.field):
        name = f"{message.name}.{field.name}"
        yield from check(SNAKE.fullmatch(field.name), name, "snake case")
        yield from check(comments.get((*path, 2, i)), name, "has a comment")
        yield from check(
            field.label != FieldDescriptorProto.LABEL_REQUIRED, name, "is not required"
        )
    for oneof in message.oneof_decl:
        # protoc makes one called _name of every optional field.
        yield from check(SNAKE.fullmatch(oneof.name.removeprefix("_")), oneof.name, "snake case")
    for i, nested in enumerate(message.nested_type):
        yield from lint_message(nested, (*path, 3, i), comments, check)
    for i, enum in enumerate(message.enum_type):
        yield from lint_enum(enum, (*path, 4, i), comments, check)


def lint_enum(
    enum: EnumDescriptorProto, path: tuple[int, ...], comments: dict[Any, str], check: Any
) -> Iterator[str]:
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
    yield from check(PASCAL.fullmatch(enum.name), enum.name, "pascal case")
    yield from check(comments.get(path), enum.name, "has a comment")
    yield from check(not enum.options.allow_alias, enum.name, "has no aliases")
    zero = enum.value[0]
    yield from check(zero.number == 0, zero.name, "the first value is 0")
    yield from check(zero.name.endswith("_UNSPECIFIED"), zero.name, "zero is *_UNSPECIFIED")
    for value in enum.value:
        yield from check(value.name.startswith(prefix), value.name, f"starts with {prefix}")
        yield from check(UPPER_SNAKE.fullmatch(value.name), value.name, "upper snake case")


def used_types(messages: Iterable[DescriptorProto]) -> Iterator[str]:
    for message in messages:
        yield from (field.type_name for field in message.field)
        yield from used_types(message.nested_type)


def test_the_protos_keep_the_rules(tmp_path: Path) -> None:
    descriptors = compile_protos(ROOT, tmp_path)
    assert len(descriptors.file) >= 4
    assert lint(descriptors) == []


BAD = {
    "message is undocumented": ("message Foo {}", "Foo: has a comment"),
    "field is undocumented": ("// A.\nmessage Foo { int32 a = 1; }", "Foo.a: has a comment"),
    "field is in camel case": (
        "// A.\nmessage Foo {\n// B.\nint32 aB = 1;\n}",
        "Foo.aB: snake case",
    ),
    "message is in snake case": ("// A.\nmessage foo {}", "foo: pascal case"),
    "nested message is undocumented": (
        "// A.\nmessage Foo { message Bar {} }",
        "Bar: has a comment",
    ),
    "enum without zero": ("// A.\nenum Kind { KIND_ONE = 0; }", "KIND_ONE: zero is *_UNSPECIFIED"),
    "enum value without prefix": (
        "// A.\nenum Kind { KIND_UNSPECIFIED = 0; ONE = 1; }",
        "ONE: starts with KIND_",
    ),
    "service without suffix": ("// A.\nservice Foo {}", "Foo: ends with Service"),
    "method is undocumented": (
        "// A.\nmessage RunRequest {}\n// A.\nmessage RunResponse {}\n"
        "// A.\nservice FooService { rpc Run(RunRequest) returns (RunResponse); }",
        "Run: has a comment",
    ),
    "request of another name": (
        "// A.\nmessage Ask {}\n// A.\nmessage RunResponse {}\n"
        "// A.\nservice FooService {\n// B.\nrpc Run(Ask) returns (RunResponse);\n}",
        "Ask: is named RunRequest",
    ),
    "import without use": (
        'import "google/protobuf/empty.proto";\n// A.\nmessage Foo {}',
        "google/protobuf/empty.proto: import is used",
    ),
}


@pytest.mark.parametrize(("text", "rule"), BAD.values(), ids=list(BAD))
def test_a_broken_rule_is_found(tmp_path: Path, text: str, rule: str) -> None:
    folder = tmp_path / "protos" / "acme" / "v1"
    folder.mkdir(parents=True)
    (folder / "a.proto").write_text(f'syntax = "proto3";\npackage acme.v1;\n{text}\n')
    found = lint(compile_protos(tmp_path / "protos", tmp_path))
    assert [line.partition(": ")[2] for line in found] == [rule]


def test_a_package_in_the_wrong_folder_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "protos"
    folder.mkdir()
    (folder / "a.proto").write_text('syntax = "proto3";\npackage acme;\n')
    found = lint(compile_protos(folder, tmp_path))
    assert {line.rpartition(": ")[2] for line in found} == {
        "package is the folder",
        "package has a version",
    }


def test_a_message_shared_by_methods_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "protos" / "acme" / "v1"
    folder.mkdir(parents=True)
    (folder / "a.proto").write_text(
        'syntax = "proto3";\npackage acme.v1;\n// A.\nmessage RunRequest {}\n'
        "// A.\nmessage RunResponse {}\n// A.\nmessage StopResponse {}\n// A.\n"
        "service FooService {\n// B.\nrpc Run(RunRequest) returns (RunResponse);\n"
        "// B.\nrpc Stop(RunRequest) returns (StopResponse);\n}\n"
    )
    found = lint(compile_protos(tmp_path / "protos", tmp_path))
    assert any("shared by FooService.Run, FooService.Stop" in line for line in found)
