/* SPDX-License-Identifier: Apache-2.0 */
/* A group that does wrong what the setting `fault` says, for tests.
 * Rules are items "comm:FROM->TO:KIND[@PLACE][=T]" (docs/faults.md). A place
 * N strikes at rank TO while it receives from FROM, "sent:N" at rank FROM
 * while it sends to TO. Invariant: without such a rule a group is untouched;
 * what a rule leaves alone is passed on as it is. */
#ifndef FERRY_COMM_COMM_FAULT_H
#define FERRY_COMM_COMM_FAULT_H

#include "comm/comm.h"

/* Wraps *comm where the setting has rules for groups, or is a file, which may
 * come to have some: it is read anew at the start of each round. The wrapper
 * owns the group. After a failure *comm is as it was. */
ferry_status ferry__comm_fault_wrap(ferry__comm **comm);

#endif
