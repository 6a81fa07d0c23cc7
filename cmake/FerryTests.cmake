# SPDX-License-Identifier: Apache-2.0
# Tests, fuzz targets, examples and benches. A test file may carry one line
# that steers how it is run, in any comment:
#   ctest: labels=deep timeout=600 serial link=worker
# (labels separated by commas, added to the folder's own; timeout in
# seconds, 120 when absent; serial runs it alone; link=worker links
# libferry_worker too).
set(FERRY_TEST_BIN "${PROJECT_BINARY_DIR}/tests")
find_program(FERRY_PYTHON NAMES python3
    PATHS "${PROJECT_SOURCE_DIR}/build/venv/bin" NO_DEFAULT_PATH)
find_program(FERRY_PYTHON NAMES python3 REQUIRED)
find_program(FERRY_BASH NAMES bash REQUIRED)

set(FERRY_TEST_ENV
    "FERRY_BUILD_DIR=${PROJECT_BINARY_DIR}"
    "FERRY_SOURCE_DIR=${PROJECT_SOURCE_DIR}"
    "FERRY_BIN=${PROJECT_BINARY_DIR}/bin/ferry"
    "FERRY_MODULE_PATH=${FERRY_MODULE_DIR}"
    "FERRY_TEST_MODULES=${FERRY_TEST_BIN}/modules"
    "FERRY_SANITIZE=${FERRY_SANITIZE}"
    "FERRY_CC=${CMAKE_C_COMPILER}"
    "FERRY_PYTHON=${FERRY_PYTHON}"
    "PYTHONDONTWRITEBYTECODE=1"
    "ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1:allocator_may_return_null=1"
    "UBSAN_OPTIONS=print_stacktrace=1"
    "LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/lsan.supp:print_suppressions=0"
    "TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:intercept_tls_get_addr=0:suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp")

# intercept_tls_get_addr: thread variables of a loaded module lie where malloc
# put them. At 16 bytes into a page the thread sanitizer takes the 16 bytes
# before them for a header of glibc 2.19, {start, size}, and clears that range:
# by chance, and then the process ends with "failed to allocate".
#
# UCX hooks madvise, which the C library calls when a thread has ended; the
# thread sanitizer has forgotten the thread by then and would crash in the
# hook's lock.
if(FERRY_SANITIZE MATCHES "thread")
    list(APPEND FERRY_TEST_ENV
        "UCX_MEM_MMAP_HOOK_MODE=none" "UCX_MEM_EVENTS=n")
endif()

# Reads the "ctest:" line of a test file into HINT_* of the caller.
macro(ferry_hints file)
    set(HINT_labels)
    set(HINT_timeout 120)
    set(HINT_serial OFF)
    set(HINT_link)
    file(STRINGS "${file}" hint_line REGEX "ctest: " LIMIT_COUNT 1)
    if(hint_line MATCHES "ctest: .*")
        if(hint_line MATCHES "labels=([A-Za-z0-9_,-]+)")
            string(REPLACE "," ";" HINT_labels "${CMAKE_MATCH_1}")
        endif()
        if(hint_line MATCHES "timeout=([0-9]+)")
            set(HINT_timeout ${CMAKE_MATCH_1})
        endif()
        if(hint_line MATCHES "ctest: .*serial")
            set(HINT_serial ON)
        endif()
        if(hint_line MATCHES "link=([a-z_,]+)")
            string(REPLACE "," ";" HINT_link "${CMAKE_MATCH_1}")
        endif()
    endif()
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${file}")
endmacro()

# Registers one command; each run gets its own TMPDIR, removed afterwards.
function(ferry_add_test name folder)
    add_test(NAME ${name}
        COMMAND "${FERRY_BASH}"
            "${PROJECT_SOURCE_DIR}/scripts/lib/run_test.sh" ${ARGN}
        WORKING_DIRECTORY "${PROJECT_BINARY_DIR}")
    set_tests_properties(${name} PROPERTIES
        TIMEOUT ${HINT_timeout}
        LABELS "${folder};${HINT_labels}"
        SKIP_RETURN_CODE 77
        RUN_SERIAL ${HINT_serial}
        ENVIRONMENT "${FERRY_TEST_ENV}")
endfunction()

# What the tests share: the harness, and the backends' wire formats, which
# live in modules and so are linked in here once more.
ferry_glob(harness tests/harness/*.c)
set(harness_programs ${harness})
list(FILTER harness_programs INCLUDE REGEX "_main\\.c$")
list(FILTER harness EXCLUDE REGEX "_main\\.c$")
if(NOT harness)
    set(harness "${PROJECT_BINARY_DIR}/empty_harness.c")
    file(WRITE "${harness}" "typedef int ferry__empty;\n")
endif()
add_library(ferry_harness STATIC ${harness} ${FERRY_WIRE_SOURCES})
ferry_target(ferry_harness)
target_include_directories(ferry_harness PUBLIC
    "${PROJECT_SOURCE_DIR}/tests")
target_link_libraries(ferry_harness PUBLIC ferry ferry::cmocka
    ferry::jansson ferry::curl Threads::Threads ${CMAKE_DL_LIBS} m)

function(ferry_test_program target out_dir)
    add_executable(${target} ${ARGN})
    ferry_target(${target})
    set_target_properties(${target} PROPERTIES
        RUNTIME_OUTPUT_DIRECTORY "${out_dir}")
    target_link_libraries(${target} PRIVATE ferry_harness)
    if(TARGET ferry_worker AND HINT_link STREQUAL "worker")
        target_link_libraries(${target} PRIVATE ferry_worker
            ggml::ggml ggml::ggml-base ggml::ggml-cpu)
    endif()
endfunction()

# build_<folder> builds the tests of one folder and all that they start or
# open, so that a sanitizer run need not build the rest.
get_property(ferry_modules GLOBAL PROPERTY FERRY_MODULES)
add_custom_target(build_support)
if(ferry_modules)
    add_dependencies(build_support ${ferry_modules})
endif()
if(TARGET ferry_nccl_host)
    add_dependencies(build_support ferry_nccl_host)
endif()
foreach(folder IN ITEMS unit contract wire system model interop fuzz)
    add_custom_target(build_${folder})
    add_dependencies(build_${folder} build_support)
endforeach()

# tests/harness/<x>_main.c are programs that tests start; .c files under
# tests/harness/modules are modules that tests open.
set(HINT_link)
foreach(file IN LISTS harness_programs)
    get_filename_component(name "${file}" NAME_WE)
    ferry_hints("${file}")
    if(HINT_link STREQUAL "worker" AND NOT TARGET ferry_worker)
        continue()
    endif()
    ferry_test_program(${name} "${FERRY_TEST_BIN}" "${file}")
    add_dependencies(build_support ${name})
endforeach()
ferry_glob(test_modules tests/harness/modules/*.c)
foreach(file IN LISTS test_modules)
    get_filename_component(name "${file}" NAME_WE)
    add_library(testmod_${name} MODULE "${file}")
    add_dependencies(build_support testmod_${name})
    ferry_target(testmod_${name})
    set_target_properties(testmod_${name} PROPERTIES PREFIX ""
        OUTPUT_NAME "${name}"
        LIBRARY_OUTPUT_DIRECTORY "${FERRY_TEST_BIN}/modules")
    target_include_directories(testmod_${name} PRIVATE
        "${PROJECT_SOURCE_DIR}/tests")
endforeach()

foreach(folder IN ITEMS unit contract wire system model interop)
    ferry_glob(tests tests/${folder}/test_*.c)
    foreach(file IN LISTS tests)
        get_filename_component(name "${file}" NAME_WE)
        string(REGEX REPLACE "^test_" "${folder}_" name "${name}")
        ferry_hints("${file}")
        if(folder STREQUAL "model")
            set(HINT_link worker)
        endif()
        if(HINT_link STREQUAL "worker" AND NOT TARGET ferry_worker)
            continue()
        endif()
        ferry_test_program(${name} "${FERRY_TEST_BIN}" "${file}")
        add_dependencies(build_${folder} ${name})
        ferry_add_test(${name} ${folder} "$<TARGET_FILE:${name}>")
    endforeach()

    ferry_glob(scripts tests/${folder}/test_*.py tests/${folder}/test_*.sh)
    foreach(file IN LISTS scripts)
        get_filename_component(name "${file}" NAME_WE)
        string(REGEX REPLACE "^test_" "${folder}_" name "${name}")
        ferry_hints("${file}")
        list(APPEND HINT_labels script)
        if(file MATCHES "\\.sh$")
            ferry_add_test(${name} ${folder} "${FERRY_BASH}" "${file}")
        else()
            # A file with a main of its own is run as it is, others by
            # pytest.
            file(STRINGS "${file}" has_main REGEX "__main__" LIMIT_COUNT 1)
            if(has_main)
                ferry_add_test(${name} ${folder}
                    "${FERRY_PYTHON}" "${file}")
            else()
                ferry_add_test(${name} ${folder} "${FERRY_PYTHON}"
                    -m pytest -q -p no:cacheprovider "${file}")
            endif()
        endif()
    endforeach()
endforeach()

# The references themselves, against values worked out by hand.
ferry_glob(references tests/reference/check_*.py)
foreach(file IN LISTS references)
    get_filename_component(name "${file}" NAME_WE)
    ferry_hints("${file}")
    list(APPEND HINT_labels script)
    ferry_add_test(reference_${name} model "${FERRY_PYTHON}"
        -m pytest -q -p no:cacheprovider "${file}")
endforeach()

# ---- fuzz targets ---------------------------------------------------------
ferry_glob(fuzzers tests/fuzz/fuzz_*.c)
foreach(file IN LISTS fuzzers)
    get_filename_component(target "${file}" NAME_WE)
    string(REGEX REPLACE "^fuzz_" "" name "${target}")
    ferry_hints("${file}")
    if(HINT_link STREQUAL "worker" AND NOT TARGET ferry_worker)
        continue()
    endif()
    if(FERRY_FUZZ)
        ferry_test_program(${target} "${PROJECT_BINARY_DIR}/fuzz" "${file}")
        target_link_options(${target} PRIVATE -fsanitize=fuzzer,address)
    else()
        ferry_test_program(${target} "${PROJECT_BINARY_DIR}/fuzz" "${file}"
            "${PROJECT_SOURCE_DIR}/tests/fuzz/replay_main.c")
        ferry_add_test(fuzz_replay_${name} fuzz "$<TARGET_FILE:${target}>"
            "${PROJECT_SOURCE_DIR}/tests/fuzz/corpus/${name}")
    endif()
    add_dependencies(build_fuzz ${target})
endforeach()

# ---- examples and benches -------------------------------------------------
# In a numbered folder each .c is its own program or, when it says
# "build: module", a module as an engine author would ship it; they see the
# installed headers only. Any other folder is one program of all its files,
# once it has a main.c, and may use ggml.
function(ferry_example_target target name)
    set_target_properties(${target} PROPERTIES
        OUTPUT_NAME "${name}" C_STANDARD 11
        RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/examples"
        LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/examples")
    target_include_directories(${target} PRIVATE
        "${PROJECT_SOURCE_DIR}/include")
    target_compile_options(${target} PRIVATE -Wall -Wextra -Werror
        ${ferry_san})
    target_link_options(${target} PRIVATE ${ferry_san} LINKER:--as-needed
        $<$<BOOL:${FERRY_UNDEFINED}>:LINKER:--allow-shlib-undefined>)
    target_link_libraries(${target} PRIVATE ferry ferry::jansson
        Threads::Threads m)
    if(FERRY_WORKER)
        target_link_libraries(${target} PRIVATE ferry::microhttpd)
    endif()
endfunction()

ferry_glob(examples examples/[0-9]*/*.c)
foreach(file IN LISTS examples)
    get_filename_component(name "${file}" NAME_WE)
    file(STRINGS "${file}" module REGEX "build: module" LIMIT_COUNT 1)
    if(module)
        add_library(example_${name} MODULE "${file}")
        set_target_properties(example_${name} PROPERTIES PREFIX "")
    else()
        add_executable(example_${name} "${file}")
    endif()
    ferry_example_target(example_${name} "${name}")
endforeach()

ferry_glob(example_mains examples/[a-z]*/main.c)
foreach(file IN LISTS example_mains)
    get_filename_component(dir "${file}" DIRECTORY)
    get_filename_component(name "${dir}" NAME)
    if(NOT FERRY_WORKER)
        continue()
    endif()
    ferry_glob(sources "examples/${name}/*.c")
    add_executable(example_${name} ${sources})
    ferry_example_target(example_${name} "${name}")
    target_compile_definitions(example_${name} PRIVATE _GNU_SOURCE)
    target_compile_options(example_${name} PRIVATE -Wshadow
        -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wpointer-arith
        -Wundef -Wwrite-strings)
    target_link_libraries(example_${name} PRIVATE ferry::curl
        ggml::ggml ggml::ggml-base ggml::ggml-cpu)
endforeach()

ferry_glob(benches bench/bench_*.c)
ferry_glob(bench_shared bench/*.c)
list(FILTER bench_shared EXCLUDE REGEX "/bench_[^/]*\\.c$")
foreach(file IN LISTS benches)
    get_filename_component(name "${file}" NAME_WE)
    ferry_hints("${file}")
    ferry_test_program(${name} "${PROJECT_BINARY_DIR}/bench" "${file}"
        ${bench_shared})
    target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
endforeach()
