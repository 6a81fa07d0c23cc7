# SPDX-License-Identifier: Apache-2.0
# The installed tree. Everything in it is found relative to the file that
# asks ($ORIGIN), so a tree can be moved as a whole.
include(CMakePackageConfigHelpers)
set(FERRY_INSTALL_MODULES "${CMAKE_INSTALL_LIBDIR}/ferry")
set(FERRY_INSTALL_CMAKE "${CMAKE_INSTALL_LIBDIR}/cmake/Ferry")

target_include_directories(ferry INTERFACE
    "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>"
    "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>")
install(TARGETS ferry EXPORT FerryTargets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT FerryTargets NAMESPACE Ferry::
    DESTINATION ${FERRY_INSTALL_CMAKE})
install(DIRECTORY include/ferry DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
    FILES_MATCHING PATTERN "*.h")

get_property(ferry_modules GLOBAL PROPERTY FERRY_MODULES)
if(ferry_modules)
    install(TARGETS ${ferry_modules}
        LIBRARY DESTINATION ${FERRY_INSTALL_MODULES})
endif()
if(TARGET ferry_nccl_host)
    install(TARGETS ferry_nccl_host
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(TARGET ferry_worker)
    install(TARGETS ferry_worker
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_SKIP)
endif()
if(TARGET ferry_program)
    install(TARGETS ferry_program
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# ggml from the private environment would be gone with the build folder, so
# its libraries go beside the modules. A system's ggml stays where it is.
if(FERRY_WORKER AND ggml_DIR MATCHES "/site-packages/")
    get_filename_component(ggml_lib "${ggml_DIR}/../.." ABSOLUTE)
    file(GLOB ggml_libraries "${ggml_lib}/libggml*.so.*")
    list(FILTER ggml_libraries INCLUDE REGEX "\\.so\\.[0-9]+$")
    install(FILES ${ggml_libraries} DESTINATION ${FERRY_INSTALL_MODULES})
endif()

configure_package_config_file(cmake/FerryConfig.cmake.in
    "${PROJECT_BINARY_DIR}/FerryConfig.cmake"
    INSTALL_DESTINATION ${FERRY_INSTALL_CMAKE})
write_basic_package_version_file(
    "${PROJECT_BINARY_DIR}/FerryConfigVersion.cmake"
    COMPATIBILITY SameMinorVersion)
install(FILES
    "${PROJECT_BINARY_DIR}/FerryConfig.cmake"
    "${PROJECT_BINARY_DIR}/FerryConfigVersion.cmake"
    DESTINATION ${FERRY_INSTALL_CMAKE})

# The way from the .pc file up to the prefix, so that the tree can be moved.
file(RELATIVE_PATH FERRY_PC_UP "/x/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/x")
string(REGEX REPLACE "/$" "" FERRY_PC_UP "${FERRY_PC_UP}")
configure_file(cmake/ferry.pc.in "${PROJECT_BINARY_DIR}/ferry.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/ferry.pc"
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

foreach(section IN ITEMS 1 3 7)
    file(GLOB pages CONFIGURE_DEPENDS
        "${PROJECT_SOURCE_DIR}/docs/man/*.${section}")
    if(pages)
        install(FILES ${pages}
            DESTINATION ${CMAKE_INSTALL_MANDIR}/man${section})
    endif()
endforeach()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
