# SPDX-License-Identifier: Apache-2.0
# Third-party libraries, each named once, as ferry::<name>. Their headers
# are system headers, so Ferry's warnings do not reach into them.
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)

foreach(pair IN ITEMS curl:libcurl jansson:jansson crypto:libcrypto)
    string(REPLACE ":" ";" pair "${pair}")
    list(GET pair 0 name)
    list(GET pair 1 module)
    pkg_check_modules(FERRY_${name} REQUIRED QUIET IMPORTED_TARGET GLOBAL
        ${module})
    add_library(ferry::${name} ALIAS PkgConfig::FERRY_${name})
endforeach()

include(CheckIncludeFile)
check_include_file(xxhash.h FERRY_HAVE_XXHASH_H)
if(NOT FERRY_HAVE_XXHASH_H)
    message(FATAL_ERROR "xxhash.h is missing (package libxxhash-dev)")
endif()

# UCX is optional: without it the provider `ucx` is not built, and says so.
pkg_check_modules(FERRY_ucx QUIET IMPORTED_TARGET GLOBAL ucx)
if(FERRY_ucx_FOUND)
    add_library(ferry::ucx ALIAS PkgConfig::FERRY_ucx)
endif()

if(FERRY_WORKER)
    foreach(pair IN ITEMS microhttpd:libmicrohttpd pcre2:libpcre2-8)
        string(REPLACE ":" ";" pair "${pair}")
        list(GET pair 0 name)
        list(GET pair 1 module)
        pkg_check_modules(FERRY_${name} REQUIRED QUIET IMPORTED_TARGET
            GLOBAL ${module})
        add_library(ferry::${name} ALIAS PkgConfig::FERRY_${name})
    endforeach()

    # The system's ggml first, else the pip package in the private
    # environment that scripts/lib/setup.sh keeps under build/venv.
    file(GLOB FERRY_GGML_HINTS
        "${PROJECT_BINARY_DIR}/venv/lib/python3*/site-packages/libggml/lib*/cmake/ggml"
        "${PROJECT_SOURCE_DIR}/build/venv/lib/python3*/site-packages/libggml/lib*/cmake/ggml")
    # Where a Python package is built, its environment is a prefix.
    foreach(prefix IN LISTS CMAKE_PREFIX_PATH)
        file(GLOB found "${prefix}/libggml/lib*/cmake/ggml")
        list(APPEND FERRY_GGML_HINTS ${found})
    endforeach()
    find_package(ggml CONFIG QUIET)
    if(NOT ggml_FOUND)
        find_package(ggml CONFIG QUIET PATHS ${FERRY_GGML_HINTS}
            NO_DEFAULT_PATH)
    endif()
    if(NOT ggml_FOUND)
        message(FATAL_ERROR "ggml not found: run scripts/lib/setup.sh, "
            "or pass -Dggml_DIR=..., or -DFERRY_WORKER=OFF")
    endif()
    message(STATUS "ggml: ${ggml_DIR}")
endif()

if(FERRY_TESTS)
    pkg_check_modules(FERRY_cmocka REQUIRED QUIET IMPORTED_TARGET GLOBAL
        cmocka)
    add_library(ferry::cmocka ALIAS PkgConfig::FERRY_cmocka)
endif()
