# SPDX-License-Identifier: Apache-2.0
# The few shapes of target that Ferry has.

# Absolute paths of the files that match, so that callers can filter.
function(ferry_glob out)
    set(patterns)
    foreach(pattern IN LISTS ARGN)
        list(APPEND patterns "${PROJECT_SOURCE_DIR}/${pattern}")
    endforeach()
    file(GLOB found CONFIGURE_DEPENDS ${patterns})
    set(${out} ${found} PARENT_SCOPE)
endfunction()

function(ferry_target target)
    target_link_libraries(${target} PRIVATE ferry_flags)
    set_target_properties(${target} PROPERTIES C_EXTENSIONS OFF)
endfunction()

# A shared library under build/lib. An empty room still gives a library, so
# that what links to it can be written first.
function(ferry_library target)
    set(sources ${ARGN})
    if(NOT sources)
        set(empty "${PROJECT_BINARY_DIR}/empty_${target}.c")
        file(WRITE "${empty}" "typedef int ferry__empty;\n")
        set(sources "${empty}")
    endif()
    add_library(${target} SHARED ${sources})
    ferry_target(${target})
    target_link_options(${target} PRIVATE
        LINKER:--as-needed)
    # The sanitizers' own symbols are resolved by the program.
    if(NOT FERRY_SANITIZE AND NOT FERRY_FUZZ AND NOT FERRY_UNDEFINED)
        target_link_options(${target} PRIVATE LINKER:-z,defs)
    endif()
endfunction()

function(ferry_map target map)
    target_link_options(${target} PRIVATE
        "LINKER:--version-script=${map}")
    set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS "${map}")
endfunction()

# A module that libferry opens on first use: build/lib/ferry/<target>.so.
function(ferry_module target)
    add_library(${target} MODULE ${ARGN})
    ferry_target(${target})
    ferry_map(${target} "${PROJECT_SOURCE_DIR}/src/module.map")
    set_target_properties(${target} PROPERTIES
        PREFIX ""
        LIBRARY_OUTPUT_DIRECTORY "${FERRY_MODULE_DIR}"
        INSTALL_RPATH "$ORIGIN/..;$ORIGIN")
    target_link_options(${target} PRIVATE LINKER:--as-needed)
    target_link_libraries(${target} PRIVATE ferry ferry::jansson
        Threads::Threads ${CMAKE_DL_LIBS} m)
    set_property(GLOBAL APPEND PROPERTY FERRY_MODULES ${target})
endfunction()

# Makes a C file that holds `file` as the NUL-terminated text `symbol`.
function(ferry_embed out file symbol)
    set(input "${PROJECT_SOURCE_DIR}/${file}")
    set(output "${PROJECT_BINARY_DIR}/embedded/${symbol}.c")
    set(script "${PROJECT_SOURCE_DIR}/cmake/FerryEmbed.cmake")
    add_custom_command(OUTPUT "${output}"
        COMMAND "${CMAKE_COMMAND}" "-DINPUT=${input}" "-DOUTPUT=${output}"
            "-DSYMBOL=${symbol}" -P "${script}"
        DEPENDS "${input}" "${script}"
        COMMENT "Embedding ${file}" VERBATIM)
    set(${out} "${output}" PARENT_SCOPE)
endfunction()
