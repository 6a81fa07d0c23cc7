# SPDX-License-Identifier: Apache-2.0
# The binding of the Python package, and in a build tree the package itself:
# build/python/ferry links to python/ferry and holds the binding, so that
# PYTHONPATH=build/python imports what was just built.
find_package(Python 3.10 COMPONENTS Interpreter Development.Module REQUIRED)
set(FERRY_PY_SOURCE "${PROJECT_SOURCE_DIR}/python/ferry")
set(FERRY_PY_TREE "${PROJECT_BINARY_DIR}/python/ferry")
set(FERRY_PY_BUILD "${FERRY_PY_SOURCE}/_ffi_build.py")

file(GLOB FERRY_PY_HEADERS CONFIGURE_DEPENDS
    "${PROJECT_SOURCE_DIR}/include/ferry/*.h" "${FERRY_PY_SOURCE}/*.h")
set(FERRY_PY_C "${PROJECT_BINARY_DIR}/python/_libferry.c")
file(MAKE_DIRECTORY "${FERRY_PY_TREE}")
add_custom_command(OUTPUT "${FERRY_PY_C}"
    COMMAND "${Python_EXECUTABLE}" "${FERRY_PY_BUILD}"
        --include "${PROJECT_SOURCE_DIR}/include"
        --output "${FERRY_PY_C}" --cc "${CMAKE_C_COMPILER}"
    DEPENDS "${FERRY_PY_BUILD}" ${FERRY_PY_HEADERS}
    COMMENT "Reading the headers for Python" VERBATIM)

# One file for every CPython from 3.10: the stable ABI.
add_library(ferry_python MODULE "${FERRY_PY_C}")
set_target_properties(ferry_python PROPERTIES
    PREFIX "" OUTPUT_NAME "_libferry" SUFFIX ".abi3.so"
    LIBRARY_OUTPUT_DIRECTORY "${FERRY_PY_TREE}"
    INSTALL_RPATH "$ORIGIN/_native/${CMAKE_INSTALL_LIBDIR}")
target_compile_definitions(ferry_python PRIVATE Py_LIMITED_API=0x030A0000)
target_include_directories(ferry_python PRIVATE
    "${PROJECT_SOURCE_DIR}/include")
target_link_libraries(ferry_python PRIVATE ferry Python::Module)

file(GLOB entries CONFIGURE_DEPENDS "${FERRY_PY_SOURCE}/*")
foreach(entry IN LISTS entries)
    get_filename_component(name "${entry}" NAME)
    if(NOT name STREQUAL "__pycache__")
        file(CREATE_LINK "${entry}" "${FERRY_PY_TREE}/${name}" SYMBOLIC)
    endif()
endforeach()

if(SKBUILD)
    install(TARGETS ferry_python
        LIBRARY DESTINATION "${SKBUILD_PLATLIB_DIR}/ferry")
endif()
