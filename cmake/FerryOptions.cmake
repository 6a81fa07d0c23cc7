# SPDX-License-Identifier: Apache-2.0
# Cache variables and the flags that every target gets.
option(FERRY_WORKER "Build the worker and the GGUF source (needs ggml)" ON)
option(FERRY_TESTS "Build tests, examples and benches" ON)
option(FERRY_PYTHON_PACKAGE
    "Build the binding of the Python package (needs cffi)" OFF)
option(FERRY_FUZZ "Build the fuzz targets with libFuzzer (clang)" OFF)
option(FERRY_COVERAGE "Instrument for line and branch coverage" OFF)
option(FERRY_UNDEFINED
    "Let parts link before the parts that they call are written" OFF)
set(FERRY_SANITIZE "" CACHE STRING
    "Sanitizers: empty, address,undefined or thread")
set(FERRY_EXTRA_CFLAGS "" CACHE STRING
    "Flags for Ferry's own files, e.g. -DFERRY_MUTANT_X for a mutant build")

if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()
# Asserts guard against programming errors and stay in every build: no
# NDEBUG.
set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O2 -g")
set(CMAKE_C_FLAGS_RELEASE "-O2")
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

add_library(ferry_flags INTERFACE)
target_include_directories(ferry_flags INTERFACE
    "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
target_compile_definitions(ferry_flags INTERFACE _GNU_SOURCE)
target_compile_options(ferry_flags INTERFACE
    -std=c11 -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes
    -Wmissing-prototypes -Wvla -Wpointer-arith -Wundef -Wwrite-strings
    -fno-common)
# gcc cannot know that ferry_fail never answers success, so it warns of each
# output read after FERRY_TRY, and does so otherwise in each release. clang's
# own check of the same mistake and the sanitizers stay.
if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
    target_compile_options(ferry_flags INTERFACE -Wno-maybe-uninitialized)
endif()
separate_arguments(ferry_extra UNIX_COMMAND "${FERRY_EXTRA_CFLAGS}")
target_compile_options(ferry_flags INTERFACE ${ferry_extra})

if(FERRY_SANITIZE)
    set(ferry_san -fsanitize=${FERRY_SANITIZE} -fno-sanitize-recover=all
        -fno-omit-frame-pointer)
    target_compile_options(ferry_flags INTERFACE ${ferry_san})
    target_link_options(ferry_flags INTERFACE ${ferry_san})
endif()
if(FERRY_FUZZ)
    if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang")
        message(FATAL_ERROR "FERRY_FUZZ needs clang (CC=clang)")
    endif()
    set(ferry_san -fsanitize=fuzzer-no-link,address -fno-omit-frame-pointer)
    target_compile_options(ferry_flags INTERFACE ${ferry_san})
    target_link_options(ferry_flags INTERFACE ${ferry_san})
endif()
if(FERRY_UNDEFINED)
    target_link_options(ferry_flags INTERFACE
        LINKER:--allow-shlib-undefined)
endif()
if(FERRY_COVERAGE)
    target_compile_options(ferry_flags INTERFACE --coverage -O0
        -fprofile-update=atomic)
    target_link_options(ferry_flags INTERFACE --coverage)
endif()
