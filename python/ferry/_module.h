/* SPDX-License-Identifier: Apache-2.0 */
/* A torch module's parameters, found anew each time without Python. Python
 * walks a module once and notes the walk as a trace of addresses
 * (_ffi_module.py); as long as a walk meets the same addresses, the names are
 * those that were found then.
 * Invariant: no address of a trace is followed, only those that the module
 * holds now. Keys and types are kept alive by Python, so that theirs are not
 * taken by others; of modules and parameters it does not matter, since a name
 * depends on which of them are one and the same, not on which they are. */
#ifndef FERRY_PY_MODULE_H
#define FERRY_PY_MODULE_H

typedef struct ferry_py_walk {
    const uintptr_t *at, *end;   /* what is left of the trace */
    PyObject *params;            /* list of those that were met */
    PyObject *own_key, *sub_key; /* of a module's two dicts */
} ferry_py_walk;

/* The next word of the trace; one that no address has, at its end. */
static uintptr_t ferry_py_walk_next(ferry_py_walk *walk)
{
    return walk->at < walk->end ? *walk->at++ : 1;
}

static bool ferry_py_walk_meets(ferry_py_walk *walk, const void *object)
{
    return ferry_py_walk_next(walk) == (uintptr_t)object;
}

/* A module's own entry, borrowed; NULL where it is no plain dict. */
static PyObject *ferry_py_walk_dict(PyObject *own, PyObject *key)
{
    PyObject *dict = PyDict_GetItemWithError(own, key);

    return dict != NULL && PyDict_CheckExact(dict) ? dict : NULL;
}

/* Key, parameter, its type, for each; the type is 0 for one that was met
 * before, or is None. */
static bool ferry_py_walk_params(ferry_py_walk *walk, PyObject *dict)
{
    PyObject *key, *param;
    Py_ssize_t pos = 0;

    while (dict != NULL && PyDict_Next(dict, &pos, &key, &param)) {
        uintptr_t type;

        if (!ferry_py_walk_meets(walk, key) ||
            !ferry_py_walk_meets(walk, param))
            return false;
        type = ferry_py_walk_next(walk);
        if (type != 0 && (type != (uintptr_t)Py_TYPE(param) ||
                          PyList_Append(walk->params, param) != 0))
            return false;
    }
    return dict != NULL && ferry_py_walk_meets(walk, NULL);
}

static bool ferry_py_walk_module(ferry_py_walk *walk, PyObject *module);

/* Key, module, whether it is met for the first time and so walked. */
static bool ferry_py_walk_children(ferry_py_walk *walk, PyObject *dict)
{
    PyObject *key, *child;
    Py_ssize_t pos = 0;
    bool same = dict != NULL;

    while (same && PyDict_Next(dict, &pos, &key, &child)) {
        same =
            ferry_py_walk_meets(walk, key) && ferry_py_walk_meets(walk, child);
        if (same && ferry_py_walk_next(walk) != 0)
            same = ferry_py_walk_module(walk, child);
    }
    return same && ferry_py_walk_meets(walk, NULL);
}

static bool ferry_py_walk_module(ferry_py_walk *walk, PyObject *module)
{
    PyObject *own;
    bool same;

    if (!ferry_py_walk_meets(walk, Py_TYPE(module)) ||
        Py_EnterRecursiveCall(" in a module's tree") != 0)
        return false;
    own = PyObject_GenericGetDict(module, NULL);
    same = own != NULL &&
           ferry_py_walk_params(walk, ferry_py_walk_dict(own, walk->own_key)) &&
           ferry_py_walk_children(walk, ferry_py_walk_dict(own, walk->sub_key));
    Py_XDECREF(own);
    Py_LeaveRecursiveCall();
    return same;
}

/* Appends the parameters of a module to a list, both by address, in the order
 * of the names of its trace. Answers whether the walk was the same. */
static bool ferry_py_module_same(uintptr_t module, const uintptr_t *trace,
                                 size_t count, uintptr_t params)
{
    PyGILState_STATE lock = PyGILState_Ensure();
    ferry_py_walk walk = {
        trace,
        trace + count,
        (PyObject *)params,
        PyUnicode_InternFromString("_parameters"),
        PyUnicode_InternFromString("_modules"),
    };
    bool same = walk.own_key != NULL && walk.sub_key != NULL &&
                ferry_py_walk_module(&walk, (PyObject *)module) &&
                walk.at == walk.end;

    Py_XDECREF(walk.own_key);
    Py_XDECREF(walk.sub_key);
    PyErr_Clear();
    PyGILState_Release(lock);
    return same;
}

/* Whether tensors, a list by address, are plain and of the types and shapes
 * that were declared, in order. */
static bool ferry_py_module_declared(uintptr_t tensors,
                                     const ferry_param_meta *declared,
                                     size_t count)
{
    PyGILState_STATE lock = PyGILState_Ensure();
    bool same = ferry_py_torch.table != NULL &&
                PyList_Size((PyObject *)tensors) == (Py_ssize_t)count;

    for (size_t i = 0; same && i < count; i++) {
        PyObject *tensor = PyList_GetItem((PyObject *)tensors, (Py_ssize_t)i);
        ferry_tensor now;

        same = ferry_py_describe(tensor, &now) &&
               now.dtype == declared[i].dtype && now.ndim == declared[i].ndim &&
               memcmp(now.shape, declared[i].shape,
                      (size_t)now.ndim * sizeof(now.shape[0])) == 0;
    }
    PyErr_Clear();
    PyGILState_Release(lock);
    return same;
}

#endif
