// Reads Python's frames without the GIL: operators release it, but a thread's own frames cannot change while it is
// inside an operator.
#pragma once

#define Py_BUILD_CORE
#include <Python.h>
#undef _PyGC_FINALIZED  // torch and Python both define it
#include <internal/pycore_frame.h>

#include <string>

namespace {

const _PyInterpreterFrame* newest_frame(PyThreadState* state) {
#if PY_VERSION_HEX >= 0x030D0000
    return state->current_frame;
#else
    return state->cframe->current_frame;
#endif
}

PyCodeObject* code_of(const _PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
    return (PyCodeObject*)frame->f_executable;
#else
    return frame->f_code;
#endif
}

// Whether a frame runs Python code that has begun; others, such as the entry from C, have no line.
bool shown(const _PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030C0000
    if (frame->owner == FRAME_OWNED_BY_CSTACK) return false;
#endif
    PyCodeObject* code = code_of(frame);
    return code && frame->prev_instr >= _PyCode_CODE(code);
}

// UTF-8 text of a str object, without calling Python: the GIL is not held, so Python must not allocate memory.
std::string text_of(PyObject* object) {
    if (!object || !PyUnicode_Check(object)) return "?";
    auto length = PyUnicode_GET_LENGTH(object);
    int kind = PyUnicode_KIND(object);
    const void* data = PyUnicode_DATA(object);
    std::string text;
    for (Py_ssize_t i = 0; i < length && i < 4096; i++) {
        uint32_t c = PyUnicode_READ(kind, data, i);
        if (c < 0x80) text += char(c);
        else if (c < 0x800) { text += char(0xC0 | c >> 6); text += char(0x80 | (c & 63)); }
        else if (c < 0x10000) { text += char(0xE0 | c >> 12); text += char(0x80 | (c >> 6 & 63)); text += char(0x80 | (c & 63)); }
        else { text += char(0xF0 | c >> 18); text += char(0x80 | (c >> 12 & 63)); text += char(0x80 | (c >> 6 & 63)); text += char(0x80 | (c & 63)); }
    }
    return text;
}

}  // namespace
