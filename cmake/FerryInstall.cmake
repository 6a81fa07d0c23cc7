# SPDX-License-Identifier: Apache-2.0
# The installed tree: headers, libraries, modules, program.
install(TARGETS ferry
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/ferry DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
    FILES_MATCHING PATTERN "*.h")
