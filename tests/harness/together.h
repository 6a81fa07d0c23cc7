/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of a test that wait for each other whatever has become of their
 * group, so that none has to sleep for as long as another might need. What
 * ends a wait that would be none is the alarm of the waiting process. */
#ifndef FERRY_TESTS_TOGETHER_H
#define FERRY_TESTS_TOGETHER_H

/* Before the ranks of a run are forked or started. */
void together_begin(void);
/* Waits until so many ranks are through. */
void together_await(int n);
/* Is through, and lives on until n ranks are: what they see until then is
 * not this rank's end. */
void together_end(int n);

#endif
