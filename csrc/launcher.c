/* The two pieces of a prepared call that Python is slow at: `describe` makes the key of a call's arguments, `run` fills
 * the data pointers into prebuilt kernel parameters and launches. Limited Python API (3.10 on), no torch and no CUDA headers:
 * tensors are read through torch's DLPack exchange table, the driver through addresses that grouped_lora_ops/driver.py
 * passes in. driver.py has the same two functions in Python and ctypes for where this file was not built. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ---- DLPack 1.x, the part used here ---- */
typedef struct { int32_t device_type, device_id; } Device;
typedef struct { uint8_t code, bits; uint16_t lanes; } DType;
typedef struct { void *data; Device device; int32_t ndim; DType dtype; int64_t *shape, *strides; uint64_t byte_offset; } Tensor;
typedef struct {
  uint32_t major, minor;
  void *previous, *allocate, *to_managed, *from_managed;
  int (*read)(void *object, Tensor *out); /* dltensor_from_py_object_no_sync: borrows, copies nothing */
  void *current_stream;
} Exchange;

/* ---- the driver's launch, as cuda.h lays it out ---- */
typedef struct { int32_t id, pad; union { uint32_t dim[3]; int32_t flag; void *align; unsigned char size[64]; } value; } Attribute;
typedef struct { uint32_t grid[3], block[3], shared; void *stream; Attribute *attributes; uint32_t count; } Config;
enum { CLUSTER = 4, STREAM_SERIALIZATION = 6 };
typedef int (*LaunchKernel)(const Config *, void *function, void **parameters, void **extra);
typedef int (*GetContext)(void **);
typedef int (*SetContext)(void *);

enum { MAX_OPERANDS = 96, MAX_PARAMETERS = 128, MAX_BYTES = 4096, KEY = 8192 };

typedef struct { uint32_t at, operand; } Slot;
typedef struct {
  void *function;
  uint32_t grid[3], threads, shared, attributes, parameters, slots, size;
  Attribute attribute[2];
  uint32_t offset[MAX_PARAMETERS]; /* of every parameter in data */
  Slot slot[MAX_PARAMETERS];       /* where data pointers go */
  unsigned char *data;
} Launch;
typedef struct { uint32_t a, b; uint64_t span_a, span_b; int64_t known; } Pair;
typedef struct {
  LaunchKernel launch;
  GetContext get_context;
  SetContext push_context;
  GetContext pop_context;
  void *context;
  Py_ssize_t operands, launches, pairs;
  Launch *launch_of;
  Pair *pair;
} Call;

enum { VERSION = 4 }; /* as in driver.py: raise both when either's use of the other changes */
static const Exchange *torch_exchange;
static PyTypeObject *tensor_type;

static int is_tensor(PyObject *o) {
  PyTypeObject *type = Py_TYPE(o);
  return type == tensor_type || PyType_IsSubtype(type, tensor_type);
}

static PyObject *setup(PyObject *self, PyObject *args) {
  int version;
  PyObject *type, *capsule;
  if (!PyArg_ParseTuple(args, "iOO", &version, &type, &capsule)) return NULL;
  if (version != VERSION) return PyErr_SetString(PyExc_RuntimeError, "built from an older launcher.c"), NULL;
  const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (exchange == NULL) return NULL;
  if (exchange->major != 1 || exchange->read == NULL) {
    PyErr_SetString(PyExc_RuntimeError, "DLPack 1 with dltensor_from_py_object_no_sync is needed");
    return NULL;
  }
  Py_INCREF(type);
  tensor_type = (PyTypeObject *)type;
  torch_exchange = exchange;
  Py_RETURN_NONE;
}

/* describe(args) -> bytes, or None for arguments it has no words for */
static PyObject *describe(PyObject *self, PyObject *args) {
  unsigned char key[KEY];
  void *seen[MAX_OPERANDS];
  size_t n = 0;
  if (tensor_type == NULL || !PyTuple_Check(args)) Py_RETURN_NONE;
  Py_ssize_t count = PyTuple_Size(args);
  if (count > MAX_OPERANDS) Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *o = PyTuple_GetItem(args, i);
    seen[i] = NULL;
    if (o == Py_None) {
      if (n + 1 > KEY) Py_RETURN_NONE;
      key[n++] = 'n';
    } else if (is_tensor(o)) {
      Tensor t;
      if (torch_exchange->read(o, &t)) {
        PyErr_Clear();
        Py_RETURN_NONE;
      }
      char *data = (char *)t.data + t.byte_offset;
      size_t bytes = (size_t)t.ndim * sizeof(int64_t);
      if (t.ndim > 16 || n + 16 + 2 * bytes > KEY || (t.ndim && t.strides == NULL)) Py_RETURN_NONE;
      Py_ssize_t same = 0; /* the first argument with this address: which of them share memory is part of the key */
      seen[i] = data;
      while (seen[same] != data) same++;
      key[n++] = 't';
      key[n++] = (unsigned char)same;
      key[n++] = (uintptr_t)data & -(uintptr_t)data & 15; /* its alignment: 1, 2, 4, 8; 0 for 16 and more */
      key[n++] = (unsigned char)t.ndim;
      key[n++] = t.dtype.code;
      key[n++] = t.dtype.bits;
      memcpy(key + n, &t.device, sizeof t.device), n += sizeof t.device;
      memcpy(key + n, t.shape, bytes), n += bytes;
      memcpy(key + n, t.strides, bytes), n += bytes;
    } else if (PyUnicode_CheckExact(o)) {
      Py_ssize_t size;
      const char *text = PyUnicode_AsUTF8AndSize(o, &size);
      if (text == NULL || size > 255 || n + 2 + (size_t)size > KEY) {
        PyErr_Clear();
        Py_RETURN_NONE;
      }
      key[n++] = 's';
      key[n++] = (unsigned char)size;
      memcpy(key + n, text, (size_t)size), n += (size_t)size;
    } else if (PyFloat_CheckExact(o)) {
      double value = PyFloat_AsDouble(o);
      if (n + 9 > KEY) Py_RETURN_NONE;
      key[n++] = 'f';
      memcpy(key + n, &value, 8), n += 8;
    } else if (PyBool_Check(o)) {
      if (n + 2 > KEY) Py_RETURN_NONE;
      key[n++] = 'b';
      key[n++] = o == Py_True;
    } else if (PyLong_CheckExact(o)) {
      int64_t value = PyLong_AsLongLong(o);
      if ((value == -1 && PyErr_Occurred()) || n + 9 > KEY) {
        PyErr_Clear();
        Py_RETURN_NONE;
      }
      key[n++] = 'i';
      memcpy(key + n, &value, 8), n += 8;
    } else if (PyList_Check(o) || PyTuple_Check(o)) {
      int list = PyList_Check(o);
      Py_ssize_t size = list ? PyList_Size(o) : PyTuple_Size(o);
      if (size > 255 || n + 2 + (size_t)size * 8 > KEY) Py_RETURN_NONE;
      key[n++] = 'l';
      key[n++] = (unsigned char)size;
      for (Py_ssize_t k = 0; k < size; k++) {
        PyObject *item = list ? PyList_GetItem(o, k) : PyTuple_GetItem(o, k);
        if (!PyLong_CheckExact(item)) Py_RETURN_NONE;
        int64_t value = PyLong_AsLongLong(item);
        if (value == -1 && PyErr_Occurred()) {
          PyErr_Clear();
          Py_RETURN_NONE;
        }
        memcpy(key + n, &value, 8), n += 8;
      }
    } else
      Py_RETURN_NONE;
  }
  return PyBytes_FromStringAndSize((char *)key, (Py_ssize_t)n);
}

static void release_call(Call *call) {
  for (Py_ssize_t i = 0; i < call->launches; i++) free(call->launch_of[i].data);
  free(call->launch_of);
  free(call->pair);
  free(call);
}

static void release(PyObject *capsule) { release_call(PyCapsule_GetPointer(capsule, "grouped_lora_ops.call")); }

static int fill(Launch *l, PyObject *from) {
  unsigned long long function;
  unsigned int cluster[3];
  int pdl;
  const char *data;
  Py_ssize_t size;
  PyObject *offsets, *slots;
  if (!PyArg_ParseTuple(from, "K(III)I(III)Ipy#OO", &function, &l->grid[0], &l->grid[1], &l->grid[2], &l->threads, &cluster[0],
                        &cluster[1], &cluster[2], &l->shared, &pdl, &data, &size, &offsets, &slots))
    return -1;
  Py_ssize_t parameters = PyTuple_Size(offsets), pointers = PyTuple_Size(slots);
  if (parameters < 0 || pointers < 0) return -1;
  if (parameters > MAX_PARAMETERS || pointers > MAX_PARAMETERS || size > MAX_BYTES) {
    PyErr_SetString(PyExc_ValueError, "too many kernel parameters");
    return -1;
  }
  l->function = (void *)(uintptr_t)function;
  if (cluster[0] * cluster[1] * cluster[2] > 1) {
    l->attribute[l->attributes].id = CLUSTER;
    memcpy(l->attribute[l->attributes++].value.dim, cluster, sizeof cluster);
  }
  if (pdl) {
    l->attribute[l->attributes].id = STREAM_SERIALIZATION;
    l->attribute[l->attributes++].value.flag = 1;
  }
  l->parameters = (uint32_t)parameters;
  l->slots = (uint32_t)pointers;
  l->size = (uint32_t)size;
  for (Py_ssize_t i = 0; i < parameters; i++) {
    unsigned long at = PyLong_AsUnsignedLong(PyTuple_GetItem(offsets, i));
    if (PyErr_Occurred()) return -1;
    if (at > (unsigned long)size) return PyErr_SetString(PyExc_ValueError, "offset outside the parameters"), -1;
    l->offset[i] = (uint32_t)at;
  }
  for (Py_ssize_t i = 0; i < pointers; i++) {
    if (!PyArg_ParseTuple(PyTuple_GetItem(slots, i), "II", &l->slot[i].at, &l->slot[i].operand)) return -1;
    if (l->slot[i].at + sizeof(void *) > (size_t)size || l->slot[i].operand >= MAX_OPERANDS)
      return PyErr_SetString(PyExc_ValueError, "pointer outside the parameters"), -1;
  }
  l->data = malloc(size ? (size_t)size : 1);
  if (l->data == NULL) return PyErr_NoMemory(), -1;
  memcpy(l->data, data, (size_t)size);
  return 0;
}

/* make((launch, get, push, pop), context, operands, launches, apart) -> the call `run` runs; driver.Launch says what is in it */
static PyObject *make(PyObject *self, PyObject *args) {
  unsigned long long launch, get, push, pop, context;
  Py_ssize_t operands;
  PyObject *launches, *apart;
  if (!PyArg_ParseTuple(args, "(KKKK)KnO!O!", &launch, &get, &push, &pop, &context, &operands, &PyTuple_Type, &launches,
                        &PyTuple_Type, &apart))
    return NULL;
  if (operands < 0 || operands > MAX_OPERANDS) return PyErr_SetString(PyExc_ValueError, "too many operands"), NULL;
  Call *call = calloc(1, sizeof *call);
  if (call == NULL) return PyErr_NoMemory();
  call->launch = (LaunchKernel)(uintptr_t)launch;
  call->get_context = (GetContext)(uintptr_t)get;
  call->push_context = (SetContext)(uintptr_t)push;
  call->pop_context = (GetContext)(uintptr_t)pop;
  call->context = (void *)(uintptr_t)context;
  call->operands = operands;
  Py_ssize_t count = PyTuple_Size(launches), pairs = PyTuple_Size(apart);
  call->launch_of = calloc((size_t)(count ? count : 1), sizeof(Launch));
  call->pair = calloc((size_t)(pairs ? pairs : 1), sizeof(Pair));
  if (call->launch_of == NULL || call->pair == NULL) {
    PyErr_NoMemory();
    goto fail;
  }
  for (; call->launches < count; call->launches++) {
    Launch *l = &call->launch_of[call->launches];
    if (fill(l, PyTuple_GetItem(launches, call->launches))) {
      free(l->data);
      goto fail;
    }
    for (uint32_t k = 0; k < l->slots; k++)
      if (l->slot[k].operand >= (uint32_t)operands) {
        free(l->data);
        PyErr_SetString(PyExc_ValueError, "no such operand");
        goto fail;
      }
  }
  for (; call->pairs < pairs; call->pairs++) {
    Pair *p = &call->pair[call->pairs];
    unsigned long long span_a, span_b;
    long long known;
    if (!PyArg_ParseTuple(PyTuple_GetItem(apart, call->pairs), "IIKKL", &p->a, &p->b, &span_a, &span_b, &known)) goto fail;
    if (p->a >= (uint32_t)operands || p->b >= (uint32_t)operands) {
      PyErr_SetString(PyExc_ValueError, "no such operand");
      goto fail;
    }
    p->span_a = span_a, p->span_b = span_b, p->known = known;
  }
  PyObject *capsule = PyCapsule_New(call, "grouped_lora_ops.call", release);
  if (capsule != NULL) return capsule;
fail:
  release_call(call);
  return NULL;
}

/* run(call, stream, args, made) -> 0, the driver's error, or -1 where memory that must lie apart may overlap: nothing was
 * launched then. Operands are numbered through args and then made. */
static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 4 || !PyTuple_Check(args[2]) || !PyTuple_Check(args[3]))
    return PyErr_SetString(PyExc_TypeError, "run(call, stream, args, made)"), NULL;
  const Call *call = PyCapsule_GetPointer(args[0], "grouped_lora_ops.call");
  if (call == NULL) return NULL;
  void *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
  if (stream == (void *)(uintptr_t)-1 && PyErr_Occurred()) return NULL;
  Py_ssize_t given = PyTuple_Size(args[2]), all = given + PyTuple_Size(args[3]);
  if (all != call->operands) return PyErr_SetString(PyExc_ValueError, "another call's operands"), NULL;
  void *pointer[MAX_OPERANDS];
  for (Py_ssize_t i = 0; i < all; i++) {
    PyObject *o = i < given ? PyTuple_GetItem(args[2], i) : PyTuple_GetItem(args[3], i - given);
    pointer[i] = NULL;
    if (is_tensor(o)) {
      Tensor t;
      if (torch_exchange->read(o, &t)) return NULL;
      pointer[i] = (char *)t.data + t.byte_offset;
    }
  }
  for (Py_ssize_t i = 0; i < call->pairs; i++) {
    const Pair *p = &call->pair[i];
    uintptr_t a = (uintptr_t)pointer[p->a], b = (uintptr_t)pointer[p->b];
    if (a < b + p->span_b && b < a + p->span_a && (int64_t)(b - a) != p->known) return PyLong_FromLong(-1);
  }
  int code = 0;
  /* without the GIL: a full launch queue makes the driver wait */
  Py_BEGIN_ALLOW_THREADS;
  void *current = NULL;
  code = call->get_context(&current);
  int pushed = code == 0 && current != call->context;
  if (pushed) code = call->push_context(call->context);
  pushed = pushed && code == 0;
  for (Py_ssize_t i = 0; i < call->launches && code == 0; i++) {
    const Launch *l = &call->launch_of[i];
    _Alignas(64) unsigned char data[MAX_BYTES]; /* this thread's copy: others may run the same call */
    void *parameters[MAX_PARAMETERS];
    Attribute attribute[2];
    memcpy(data, l->data, l->size);
    memcpy(attribute, l->attribute, sizeof attribute);
    for (uint32_t k = 0; k < l->parameters; k++) parameters[k] = data + l->offset[k];
    for (uint32_t k = 0; k < l->slots; k++) memcpy(data + l->slot[k].at, &pointer[l->slot[k].operand], sizeof(void *));
    Config config = {{l->grid[0], l->grid[1], l->grid[2]}, {l->threads, 1, 1}, l->shared, stream, attribute, l->attributes};
    code = call->launch(&config, l->function, parameters, NULL);
  }
  if (pushed) call->pop_context(&current);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLong(code);
}

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, "setup(version, tensor type, its __dlpack_c_exchange_api__)"},
    {"describe", describe, METH_O, "describe(args) -> bytes | None"},
    {"make", make, METH_VARARGS, "make(functions, context, operands, launches, apart) -> call"},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, "run(call, stream, args, made) -> code"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_launcher", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__launcher(void) { return PyModule_Create(&module); }
